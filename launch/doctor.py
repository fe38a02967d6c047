"""Examine the machines that ranks are to run on: `python -m launch.doctor --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: the packages are beside this file's folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.doctor.options import DoctorRun
from launch.program.compose import Program, model_help
from launch.program.ending import leave
from launch.program.run import run_program

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: python -m launch.doctor [name=value ...]          (one host; starts its own ranks)
       torchrun ... -m launch.doctor [name=value ...]    (several hosts; docs/slurm.md has the batch script)

Says within ten minutes whether these machines can do it: versions and environment of all ranks, links, memory and
matrix products against their bounds, a prompt over all ranks against one rank, a rank that is killed and one that is
stopped, decoding against memory bandwidth, and KV-Runahead against one rank, tensor parallelism, zigzag and what
compute allows. What falls short is said in words, with the likely cause and the remedy. docs/doctor.md explains it.

  doctor.ranks=<n>           on this host; by default one per GPU, or two without GPUs
  doctor.lengths=[512,2048]  prompt lengths; by default three by device
  doctor.minutes=10          what would not fit is left out
  doctor.rounds=2            doctor.faults=true   doctor.timeout_s=5 (of the fault drills)
  doctor.out=doctor          folder of doctor.txt, doctor.json and doctor.png
{model_help(29)}
                             by default model=random model.config=auto, a shape that fits the GPUs
  ranks.device=...           ranks.backend=...   ranks.threads=<n>   ranks.timeout_s=60

The exit status is 1 if a check failed, and 0 if all is well or only short of a bound.
"""

DOCTOR = Program(module="launch.doctor", options=DoctorRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(DOCTOR, args, _never, without_ranks=_examine)


def _examine(run: DoctorRun) -> bool:
    """Examine, in a process that is no rank itself."""
    # Imported here because it imports torch, which --help and a mistyped option need not wait for.
    from benchmarks.doctor.doctor import examine

    status = examine(run)
    if status:
        raise SystemExit(status)
    return True


def _never(run: DoctorRun, ranks: Ranks) -> None:
    raise AssertionError("the doctor starts its ranks itself")


if __name__ == "__main__":
    leave(main())
