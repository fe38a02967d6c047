"""What every benchmark shares: JSON lines, the machine's description, tables."""
