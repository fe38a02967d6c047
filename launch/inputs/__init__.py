"""Inputs of a run: options, prompts, partitions and policies."""
