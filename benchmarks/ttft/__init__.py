"""Time to first token of all prefills in turn: what launch/bench.py measures."""
