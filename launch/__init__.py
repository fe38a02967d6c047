"""The programs of the command line, and the server."""
