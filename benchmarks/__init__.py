"""Measurements, and what they need."""
