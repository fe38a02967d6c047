"""`python -m policies.prompt_cache.encode` runs launch/encode.py."""

from launch.encode import main
from launch.program.ending import leave

if __name__ == "__main__":
    leave(main())
