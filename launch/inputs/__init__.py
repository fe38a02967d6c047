"""What the user asks for: prompts, partition, policies."""
