"""Searches for the context partition with the lowest TTFT, on live ranks or simulated clusters."""
