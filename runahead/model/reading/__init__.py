"""Models whose layers read the keys and values of others by their config: who reads whose, and passes over a prompt."""
