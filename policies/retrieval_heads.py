"""`python -m policies.retrieval_heads` runs launch/retrieval_heads.py."""

from launch.program.ending import leave
from launch.retrieval_heads import main

if __name__ == "__main__":
    leave(main())
