"""What the user gets: answers on standard output, a summary on standard error."""
