"""The APIs that the server speaks: each reads requests into those of a chat or a completion, and writes answers."""
