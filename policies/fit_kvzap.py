"""`python -m policies.fit_kvzap` runs launch/fit_kvzap.py."""

from launch.fit_kvzap import main
from launch.program.ending import leave

if __name__ == "__main__":
    leave(main())
