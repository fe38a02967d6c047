"""One question each: `python -m benchmarks.studies.<name>`."""
