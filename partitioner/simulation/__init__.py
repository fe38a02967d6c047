"""Event simulation of a prefill on a cluster, and bounds that no partition can beat."""
