"""Benchmarks and studies, and the modules that they share."""
