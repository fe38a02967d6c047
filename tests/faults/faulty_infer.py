"""launch/infer.py with a fault in one rank, at a chosen moment.

The environment variable FAULT holds JSON: the `rank` that it happens on; the `moment` (import, connect, load, prefill,
send, copy, decode or report) and for prefill, send and copy the `layer`; and what it is to `do`:

    kill, stop     end or stop this process
    raise          raise in the middle of the call
    no_memory      let the process have no more memory than it has now, and ask for some
    tell           write the file MOMENT and go on once the file ACTED is there; what happens in between is up to others
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from launch.program.ending import leave

NEEDED_BYTES = 1 << 28
"""Memory that a layer of a long prompt would ask for."""

LATEST_S = 20.0


def act(do: str) -> None:
    if do != "tell":
        Path(os.environ["MOMENT"]).write_text(str(os.getpid()))
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif do == "raise":
        raise RuntimeError("a fault was injected")
    elif do == "no_memory":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (1 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.ones(NEEDED_BYTES, dtype=torch.uint8)
    elif do == "tell":
        moment, acted = Path(os.environ["MOMENT"]), Path(os.environ["ACTED"])
        moment.write_text(str(os.getpid()))
        deadline = time.monotonic() + LATEST_S
        while not acted.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
    else:
        raise ValueError(f"FAULT: do={do} is unknown")


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Have `action` see the arguments of every call of a method before the method does."""
    method = getattr(owner, name)

    def with_action(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, with_action)


def inject(fault: dict[str, Any], armed: Path | None = None) -> None:
    """Patch the runtime so that the fault happens once, at its moment.

    Args:
        armed: it does not happen before this file is there.
    """
    from runahead.cache.attention import CausalAttention
    from runahead.decoding.token_stream import TokenStream
    from runahead.kv_transfer.copy import CopyTransfer
    from runahead.kv_transfer.gloo import GlooTransfer
    from runahead.model import loading
    from runahead.model.model import Model
    from runahead.prefill.chain_run import ChainRun
    from runahead.prefill.stage_run import StageRun

    pending = [fault["do"]]

    def once() -> None:
        if pending and (armed is None or armed.exists()):
            act(pending.pop())

    def at_layer(_: Any, layer: int, *rest: Any, **more: Any) -> None:
        if layer == fault["layer"]:
            once()

    def at_step(_: Any, ids: torch.Tensor, attention: Any, **more: Any) -> None:
        if isinstance(attention, CausalAttention) and ids.shape[1] == 1 and more["start"] > 1:
            once()

    match fault["moment"]:
        case "import":  # of what the program has not imported yet
            once()
        case "connect":
            from runahead.ranks.ranks import Ranks

            before(Ranks, "_connect", lambda *_: once())
        case "load":
            before(loading, "load", lambda *_, **__: once())
        case "prefill":
            before(ChainRun, "before_save", lambda _, call: at_layer(_, call.layer))
            before(StageRun, "_after_layer", lambda run: at_layer(run, run.num_done))  # of a stage that is alone
        case "send":
            for carrier in (GlooTransfer, CopyTransfer):
                before(carrier, "send", at_layer)
        case "copy":
            # Keys and values are in the other rank's slab, and it has not been told so.
            CopyTransfer._logged = lambda self, message: lambda *_: at_layer(self, message.layer)
        case "decode":
            # The rank that decodes in the middle of it; the others when they begin to wait for it.
            before(Model, "forward", at_step)
            before(TokenStream, "relay", lambda *_: once())
        case "report":
            from launch import infer

            before(infer, "_write_files", lambda *_: once())
        case other:
            raise ValueError(f"FAULT: moment={other} is unknown")


def main() -> int:
    # As late as launch/infer.py imports it: the arguments are read first.
    from launch import infer

    fault = json.loads(os.environ.get("FAULT", "{}"))
    if fault and fault["do"] == "stop":
        from tests.beat_clock import keep_beats

        keep_beats(silent=fault["rank"])
    if fault and fault["rank"] == int(os.environ["RANK"]):
        inject(fault)
    return infer.main()


if __name__ == "__main__":
    leave(main())
