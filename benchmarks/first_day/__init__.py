"""The work of launch/first_day.py: what a machine with GPUs runs first, in short parts, and what it should show."""
