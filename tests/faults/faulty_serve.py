"""launch/serve.py with a fault in one rank, as tests/faults/faulty_infer.py has it, once the file ARMED is there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.program.ending import leave
from tests.faults.faulty_infer import inject


def main() -> int:
    from launch import serve

    fault = json.loads(os.environ.get("FAULT", "{}"))
    if fault and fault["rank"] == int(os.environ["RANK"]):
        inject(fault, armed=Path(os.environ["ARMED"]))
    return serve.main()


if __name__ == "__main__":
    leave(main())
