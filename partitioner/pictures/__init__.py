"""Pictures of lookup tables and of searches."""
