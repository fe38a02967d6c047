"""Try out on GPUs what was built without them: `python -m launch.first_day --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: the packages are beside this file's folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.first_day.options import FirstDayRun, without_hydra
from benchmarks.first_day.parts import listed
from launch.program.ending import MISTAKE, end_with, leave, open_closed_streams, refuse, say
from launch.program.launcher import follow_launcher
from runahead.failures import SharedError

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: python -m launch.first_day [name=value ...]          (one host, with one GPU or several; starts its own ranks)
       torchrun ... -m launch.first_day [name=value ...]    (several hosts; launch/slurm/first_day.sbatch under SLURM)

Runs what nobody has run on GPUs yet, in parts of at most four minutes, those of most worth first, and prints
figures beside their estimates. A part that hangs is ended alone. Without a GPU it is a rehearsal on small sizes.

  first_day.minutes=15       time budget; a part that would not fit any more is left out
  first_day.parts=[<name>]   only these; a name's beginning up to an underscore, such as copy, chooses several
  first_day.without=[<name>] all but these
  first_day.out=first_day    new folder: first_day.txt and .json, figures.jsonl, the logs of every part
  ranks.device=...           ranks.threads=<n>   ranks.timeout_s=60
  ranks.backend=...          of parts on several GPUs; ranks that share a GPU start over Gloo

Parts, in order:
{listed()}
The exit status is 1 if a part failed. Please send the folder with what you report.
"""

WHEELS = {"hydra": "hydra-core>=1.3,<1.4", "omegaconf": "omegaconf>=2.3,<2.4"}
"""The packages that read the options of programs, by module; the parts themselves need neither."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    missing = [wheel for module, wheel in WHEELS.items() if find_spec(module) is None]
    if missing:
        return _run_bare(sys.argv[1:] if args is None else args, missing)
    # Imported here, since a machine for a first look may have no Hydra.
    from launch.program.compose import Program
    from launch.program.run import run_program

    program = Program(module="launch.first_day", options=FirstDayRun, help=HELP)
    return run_program(program, args, _never, without_ranks=_spend)


def _run_bare(args: Sequence[str], missing: Sequence[str]) -> int:
    """Run without Hydra: options are name=value alone."""
    open_closed_streams()
    if set(args) & {"--help", "-h"}:
        print(HELP, end="")
        return 0
    wheels = " ".join(f"'{wheel}'" for wheel in missing)
    say(f"warning: options are read without Hydra, as YAML; for the other programs: pip install {wheels}")
    try:
        follow_launcher()
        run = without_hydra(args)
    except SharedError:
        return MISTAKE
    except ValueError as error:
        return refuse(error)
    try:
        _spend(run)
    except BaseException as error:
        end_with(error, None)
    return 0


def _spend(run: FirstDayRun) -> bool:
    """Run the parts, in a process that is no rank itself."""
    # Imported here because it imports torch, which --help and a mistyped option need not wait for.
    try:
        from benchmarks.first_day.first_day import spend
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing; install it, or all that is needed with pip install .") from error

    status = spend(run)
    if status:
        raise SystemExit(status)
    return True


def _never(run: FirstDayRun, ranks: Ranks) -> None:
    raise AssertionError("the first day starts its ranks itself")


if __name__ == "__main__":
    leave(main())
