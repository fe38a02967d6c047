"""Models that were trained to mark tokens, or to let them join: what their layers take of queries and keys."""
