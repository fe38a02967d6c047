"""Texts longer than the model's context."""
