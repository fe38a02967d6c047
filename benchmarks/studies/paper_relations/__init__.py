"""The relations of the KV-Runahead paper, by simulation."""
