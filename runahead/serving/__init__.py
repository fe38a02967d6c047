"""Serving of many requests: a queue on rank 0, and one sequence of work items that all ranks carry out."""
