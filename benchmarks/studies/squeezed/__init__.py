"""A study of Squeezed Attention."""
