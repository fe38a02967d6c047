"""Times of two commits, measured in turn on one machine."""
