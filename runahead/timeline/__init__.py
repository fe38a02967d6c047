"""Timeline of a prefill: what every rank did when, measured by clocks and written as a trace and a picture."""
