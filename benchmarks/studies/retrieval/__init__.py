"""Time and loss of retrieval: of generated tokens, and of a second turn."""
