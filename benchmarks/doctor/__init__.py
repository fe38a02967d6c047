"""The work of launch/doctor.py: checks of a machine, measurements against their bounds, and the page about them."""
