"""Build the kernels of our own for this machine's processor: `python -m launch.kernels`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch.program.ending import MISTAKE
from runahead.failures import first_line

HELP = """\
usage: python -m launch.kernels

Compiles kernels for CPUs (attention, norms, rotary embeddings, products of 8-bit weights) into the cache folder
(RUNAHEAD_CACHE, else ~/.cache/runahead), which takes about ten seconds of a C++ compiler (CXX, else c++), compares them
with plain computations, and prints their path. Runs use them from then on; without them all of it is PyTorch's, which a
run says, and model.weights=int8 is refused. Another version of torch or another processor needs another build. Deleting
the file's folder undoes it, and they can be built again. The exit status is 2 where they cannot be built.
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit status: 0 if the kernels are there, 2 if not."""
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments:
        is_help = arguments in (["--help"], ["-h"])
        print(HELP if is_help else "launch.kernels takes no options; see --help", end="" if is_help else "\n")
        return 0 if is_help else MISTAKE
    from runahead.model.loading.kernels import build  # it imports torch, which --help need not wait for

    print("building the kernels, or waiting for a process that does ...", file=sys.stderr, flush=True)
    try:
        print(build())
    except (ValueError, OSError) as error:
        print(f"not built: {first_line(error)}")
        return MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
