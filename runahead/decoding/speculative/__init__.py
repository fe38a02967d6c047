"""Speculative decoding: what drafts tokens, the forward that verifies them, and whether that pays."""
