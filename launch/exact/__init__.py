"""Search of the layers that xattention leaves exact."""
