"""A distributed program on hosts joined by a slow link, all on this machine; needs root.

python -m benchmarks.network gbps=1 [hosts=2] [nproc=1] -- launch/infer.py prompt.random_tokens=4096
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.network.shaped_network import ShapedNetwork
from benchmarks.network.torchrun import run_in

OPTIONS: dict[str, type[int] | type[float]] = {"gbps": float, "hosts": int, "nproc": int}


def main(args: Sequence[str]) -> int:
    """Run the command. Returns the program's exit status; 2 for a wrong command line or machine, 130 if interrupted."""
    try:
        own, program = _split(args)
        with ShapedNetwork(int(own.get("hosts", 2)), gbps=own["gbps"]) as network:
            return run_in(network, program, nproc_per_host=int(own.get("nproc", 1)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _split(args: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Split the arguments into options before `--`, by name, and the program after it. Raises: ValueError."""
    if "--" not in args:
        raise ValueError("no program; use: python -m benchmarks.network gbps=1 -- <script> <its arguments>")
    at = list(args).index("--")
    own = {}
    for name, _, text in (arg.partition("=") for arg in args[:at]):
        if name not in OPTIONS:
            raise ValueError(f"unknown option {name}; known: {', '.join(OPTIONS)}")
        try:
            own[name] = OPTIONS[name](text)
        except ValueError:
            raise ValueError(f"{name}={text} is not a number") from None
    if "gbps" not in own:
        raise ValueError("the rate of the link is missing; give gbps=1")
    return own, list(args[at + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
