"""Speculative prefill: a cheap model reads a prompt and looks ahead, and only what it attends to is computed."""
