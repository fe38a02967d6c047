"""Run of a program, from its command line to its exit status."""
