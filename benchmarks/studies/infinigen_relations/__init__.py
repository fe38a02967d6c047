"""InfiniGen's premises, measured as relations: similar inputs of consecutive layers, and partial keys."""
