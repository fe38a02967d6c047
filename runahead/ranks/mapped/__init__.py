"""Memory that ranks of one host map, and copies into it."""
