"""Seconds of compute and of transfers, measured, fitted or counted."""
