"""A store of keys and values in three tiers: its entries, the memory of each tier, copies, and files."""
