"""The server: OpenAI's API over HTTP in front of the runtime's scheduler, and its options, answers and metrics."""
