"""Lookup tables: entries, JSON format, interpolation, and the model and device that a table is valid for."""
