"""Cost model: seconds of compute, measured, fitted or counted, and seconds of transfers over links."""
