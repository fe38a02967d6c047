"""The page at / of the server: its files, and the state of the server that it shows."""
