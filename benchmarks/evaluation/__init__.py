"""What a cache policy costs: quality of the text, recall, bytes and speed, measured by launch/evaluate.py."""
