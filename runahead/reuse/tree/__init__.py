"""Parts of a prefix tree: its nodes, the tiers that they are in, and their files."""
