"""Attention to some of the keys, as (output, log-sum-exp), and its merge."""
