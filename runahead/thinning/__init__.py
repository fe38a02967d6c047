"""Cache policies at work on a rank: what is dropped, and attention to the rest."""
