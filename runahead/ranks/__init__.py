"""The processes of a job: start, names, control messages, waiting for each other, and faults."""
