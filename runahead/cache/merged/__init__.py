"""Keys and values of two layers that share directions."""
