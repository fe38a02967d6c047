"""`python -m policies.skew` runs launch/skew.py."""

from launch.program.ending import leave
from launch.skew import main

if __name__ == "__main__":
    leave(main())
