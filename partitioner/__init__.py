"""Search for the context partition with the earliest first token: costs, simulation, searches and lookup tables."""
