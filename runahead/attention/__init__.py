"""Partial attention: attention to a subset of the keys as (output, log-sum-exp), and its merge."""
