"""What launch/doctor.py does: checks of a machine, measurements against their bounds, and the page about them."""
