"""Reuse of prompt segments: their keys and values are encoded once, stored, and attended to by later prompts."""
