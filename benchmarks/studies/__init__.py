"""Studies, one question each: `python -m benchmarks.studies.<name>`."""
