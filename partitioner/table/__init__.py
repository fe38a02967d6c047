"""Lookup tables: entries, JSON format, interpolation, and what a table is valid for."""
