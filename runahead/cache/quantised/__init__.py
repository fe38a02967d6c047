"""Keys and values in 8, 4 or 2 bits."""
