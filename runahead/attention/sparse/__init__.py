"""Block-sparse attention: blocks of queries attend to some blocks of keys."""
