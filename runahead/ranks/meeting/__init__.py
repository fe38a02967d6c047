"""Meeting of the ranks of a job: where they meet, who they are, and how they know each other's messages."""
