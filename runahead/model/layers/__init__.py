"""Parts of a model's layers that the runtime finds, reads or replaces; transformers' code stays as it is."""
