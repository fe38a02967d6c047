"""Storage for keys and values: slabs, layers that policies cut back."""
