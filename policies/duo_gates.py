"""`python -m policies.duo_gates` runs launch/duo_gates.py."""

from launch.duo_gates import main
from launch.program.ending import leave

if __name__ == "__main__":
    leave(main())
