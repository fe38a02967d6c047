"""Comparison of the time to first token of all prefills, run in turn by launch/bench.py."""
