"""What does not go together: facts about a run, and the table of combinations that are refused."""
