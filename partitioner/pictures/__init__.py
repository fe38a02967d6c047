"""Pictures of tables and of searches."""
