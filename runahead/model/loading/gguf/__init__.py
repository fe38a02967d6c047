"""GGUF files: their headers, and conversions that later runs map."""
