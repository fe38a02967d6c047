"""Agreement with kvpress on the tokens that policies keep."""
