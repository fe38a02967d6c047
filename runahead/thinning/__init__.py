"""Execution of cache policies on a rank: dropping tokens after each layer, and attention to the rest."""
