"""Decoding, after the prefill: the loop over new tokens, sampling, stop strings and the stream of tokens to rank 0."""
