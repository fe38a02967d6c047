"""Storage for keys and values: slabs, thinned layers, layers in host memory."""
