"""Evaluation of cache policies: text quality, recall, KV cache bytes and speed, measured by launch/evaluate.py."""
