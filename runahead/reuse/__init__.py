"""Keys and values of prompt segments, encoded once and reused."""
