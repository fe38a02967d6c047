"""Compare prefill strategies with each other and with what compute allows: `python launch/bench.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: the packages are beside this file's folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ttft.options import BenchRun, Network, ineffective_settings
from benchmarks.ttft.variants import VARIANTS
from launch.program.compose import Program, model_help
from launch.program.ending import leave
from launch.program.run import run_program

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: torchrun --nproc-per-node=N launch/bench.py [name=value ...]
       python launch/bench.py bench.network=netns link.gbps=1 [name=value ...]     (as root; starts its own ranks)

States what compute allows, then runs variants in turn (A B C A B C ...) on the same prompts, prints a table per length
and appends a JSON line per variant and length to bench.results. python -m benchmarks.ttft.plot draws and tabulates.

  bench.variants=[single,kvr_s,zigzag,tsp]   of {", ".join(list(VARIANTS)[:7])},
                                             {", ".join(list(VARIANTS)[7:12])},
                                             {", ".join(list(VARIANTS)[12:17])},
                                             {", ".join(list(VARIANTS)[17:])}
  bench.lengths=[1024,2048,4096]   bench.pairs=5 (rounds)   bench.warmup=1   bench.probe_repeats=3   bench.strict=true
  bench.results=benchmarks/results/bench.jsonl   bench.resume=false   bench.dirty=false   bench.compute=<json>
  bench.network=given|netns        link.gbps=<rate or list>   link.compute_share=<share or list>
                                   link.noise=off
  partition=auto|even|ratios|table ...  of kv_runahead; a table's splits are kvr_s, else they are searched on the spot
{model_help()}
  profile=none|nvtx         names for a profiler around it, such as Nsight Systems
  prefill.layers_in_flight=3   ranks.device=...   ranks.backend=...   ranks.threads=<n>   ranks.timeout_s=60

After an interruption bench.resume=true goes on with what is missing.
"""

BENCH = Program(module="launch.bench", options=BenchRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    arguments = list(sys.argv[1:] if args is None else args)
    return run_program(
        BENCH,
        arguments,
        _bench,
        warnings=ineffective_settings,
        without_ranks=lambda run: _on_shaped_network(run, arguments),
    )


def _on_shaped_network(run: BenchRun, args: Sequence[str]) -> bool:
    """Start the ranks in network namespaces if bench.network=netns; returns whether it did."""
    if run.bench.network is not Network.netns:
        return False
    from benchmarks.ttft.shaped_runs import run_on_shaped_network

    run_on_shaped_network(run, Path(__file__).resolve(), args)
    return True


def _bench(run: BenchRun, ranks: Ranks) -> None:
    # Imported here because it imports torch, which --help and a mistyped option need not wait for.
    from benchmarks.ttft.benchmark import bench

    bench(run, ranks)


if __name__ == "__main__":
    leave(main())
