"""Outputs of a run: answers on standard output, a summary on standard error, tables."""
