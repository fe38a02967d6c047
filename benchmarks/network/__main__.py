"""A distributed program on hosts joined by a slow link, all on this machine; needs root:

python -m benchmarks.network gbps=1 [hosts=2] [nproc=1] -- launch/infer.py prompt.random_tokens=4096
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.network.shaped_network import ShapedNetwork
from benchmarks.network.torchrun import run_in

DEFAULTS = {"gbps": None, "hosts": "2", "nproc": "1"}


def main(args: Sequence[str]) -> int:
    """Run the command. Returns the program's exit status; 2 for a wrong command line or machine, 130 if interrupted."""
    try:
        own, program = _split(args)
        hosts, nproc, gbps = (_number(name, own[name]) for name in ("hosts", "nproc", "gbps"))
        with ShapedNetwork(int(hosts), gbps=gbps) as network:
            return run_in(network, program, nproc_per_host=int(nproc))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _split(args: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the arguments into options before `--`, by name, and the program after it. Raises: ValueError."""
    if "--" not in args:
        raise ValueError("no program; use: python -m benchmarks.network gbps=1 -- <script> <its arguments>")
    at = list(args).index("--")
    given = dict(arg.partition("=")[::2] for arg in args[:at])
    unknown = given.keys() - DEFAULTS.keys()
    if unknown:
        raise ValueError(f"unknown option {min(unknown)}; known: {', '.join(DEFAULTS)}")
    if "gbps" not in given:
        raise ValueError("the rate of the link is missing; give gbps=1")
    return {name: given.get(name) or str(default) for name, default in DEFAULTS.items()}, list(args[at + 1 :])


def _number(name: str, text: str) -> float:
    try:
        return float(text) if name == "gbps" else int(text)
    except ValueError:
        raise ValueError(f"{name}={text} is not a number") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
