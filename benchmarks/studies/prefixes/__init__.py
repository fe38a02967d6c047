"""Studies of the prefix tree's tiers."""
