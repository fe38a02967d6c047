"""The way of a request's body: bytes, checked fields, generation options and prompts as token ids."""
