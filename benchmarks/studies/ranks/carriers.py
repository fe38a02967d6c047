"""Time of a prefill over each carrier of prefill.carrier, in turn: TTFT, and a rank's time in sends and waits.

    torchrun --nproc-per-node=2 -m benchmarks.studies.ranks.carriers --tokens 2048 --rounds 5

Weights are random, of the shape of SmolLM2-135M; --layers takes fewer layers. Rank 0 prints medians and each round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks, from_ratios
from runahead.config import Carrier, Device, RanksOptions, Transfer
from runahead.kv_transfer import CopyTransfer, KVTransfer
from runahead.kv_transfer.gloo import GlooTransfer


def model(num_layers: int) -> Model:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    return Model(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def timed_sends() -> list[float]:
    """Seconds that this rank's main thread is in sends, added up from now on in the one element returned."""
    seconds = [0.0]
    carriers: list[type[KVTransfer]] = [GlooTransfer, CopyTransfer]
    for carrier in carriers:

        def timed(self: Any, layer: int, send: Any = carrier.send) -> None:
            began_s = time.perf_counter()
            send(self, layer)
            seconds[0] += time.perf_counter() - began_s

        carrier.send = timed  # type: ignore[method-assign]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first", type=float, default=0.56, help="share of the prompt of rank 0")
    parser.add_argument("--transfer", choices=[each.name for each in Transfer], default="relay")
    options = parser.parse_args()
    with Ranks.start(RanksOptions(device=Device.cpu, threads=1)) as ranks:
        compared, sends = model(options.layers), timed_sends()
        others = ranks.size - 1
        partition = from_ratios([options.first] + [(1 - options.first) / others] * others if others else [1.0])
        ids = torch.randint(49152, (options.tokens,), generator=torch.Generator().manual_seed(1)).tolist()
        found: dict[Carrier, list[list[float]]] = {Carrier.backend: [], Carrier.copy: []}
        for number in range(options.rounds + 1):
            for carrier, rows in found.items():
                prefill = PrefillOptions(carrier=carrier, transfer=Transfer[options.transfer])
                engine = Engine(compared, ranks, prefill=prefill, partition=partition)
                sends[0] = 0.0
                batch = engine.generate([ids], GenerationOptions(max_new_tokens=1, ignore_eos=True))
                in_sends = ranks.gather(sends[0], "the times")
                row = [batch.ttft_s, *(1e3 * each for each in in_sends), *(1e3 * each.wait_s for each in batch.ranks)]
                rows.extend([row] * (number > 0))
                if ranks.rank == 0:
                    print(f"{number} {carrier.name:8}", " ".join(f"{value:9.3f}" for value in row), flush=True)
        if ranks.rank == 0:
            print("medians: TTFT in s, then ms in sends and in waits, by rank; TTFT of copy to backend in each round")
            for carrier, rows in found.items():
                print(
                    f"{carrier.name:8}", " ".join(f"{statistics.median(each):9.3f}" for each in zip(*rows, strict=True))
                )
            print([f"{b[0] / a[0]:.3f}" for a, b in zip(*found.values(), strict=True)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
