"""Studies, one question each: `python -m benchmarks.studies.<name>`; those of live ranks are in ranks/."""
