"""Searches for the context partition with the earliest first token."""
