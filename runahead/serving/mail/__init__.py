"""Mail between the ranks of a server, and the form of what it carries."""
