"""From the logits of the first token to the end of the text."""
