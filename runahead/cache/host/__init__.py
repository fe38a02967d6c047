"""Keys and values in host memory while a GPU computes: their layers, the memory, and copies from and to it."""
