"""What speculative prefill saves and loses, beside PyramidInfer and SnapKV at the same share of tokens."""
