"""vLLM's side of a handed-over prompt: Runahead computes it, vLLM goes on from its keys and values.

vLLM loads `runahead_vllm.connector`; it alone, and `metrics`, import vLLM. README.md beside this package says how to
start both sides.
"""
