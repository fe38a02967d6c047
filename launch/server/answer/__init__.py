"""The way of an answer: tokens from the scheduler's thread, text, OpenAI's objects, and what a client is sent."""
