"""Keys and values in 4 or 2 bits."""
