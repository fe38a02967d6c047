"""When each rank did what: clocks, spans, traces and their picture."""
