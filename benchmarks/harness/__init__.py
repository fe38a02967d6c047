"""Modules that all benchmarks share: JSON lines, the machine's description, tables, and the harness of a study."""
