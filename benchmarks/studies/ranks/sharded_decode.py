"""Is decoding faster where the keys and values lie, and does decode=auto take the faster way? On two live ranks.

    torchrun --nproc-per-node=2 -m benchmarks.studies.ranks.sharded_decode

For each length and split of the prompt, decode=last, sharded and auto answer the same prompt in turn (A B C A B C ...),
prefill included; ranks are pinned to a core each. Appends a JSON line per length and split to
benchmarks/results/sharded_decode.jsonl: seconds per token after the first, whether all chose the same tokens, and the
bytes of keys and values of each rank beside those that are expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option, times_as_fast
from benchmarks.studies.ranks.auto_split import pin_to_a_core
from runahead import (
    DecodeOptions,
    Engine,
    GenerationOptions,
    Model,
    ModelOptions,
    PrefillOptions,
    Ranks,
    RanksOptions,
    from_ratios,
)
from runahead.cache.shard import shard_bytes, shards
from runahead.config import DecodeName
from runahead.context import ContextPartition


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length and split."""
    pin_to_a_core()
    with Ranks.start(RanksOptions(threads=1)) as ranks:
        if ranks.size != 2:
            raise ValueError(f"{ranks.size} ranks were started; use torchrun --nproc-per-node=2")
        model = Model.load(ModelOptions(), ranks.device, ranks_on_host=ranks.local_size)
        for length in run.options.lengths:
            for first in run.options.first:
                about = {"length": length, "first": first, "new": run.options.new}
                yield about | {"dtype": str(model.dtype)} | _compared(run, model, ranks, length, first)


def _compared(run: Run, model: Model, ranks: Ranks, length: int, first: float) -> Line:
    """The figures of one length and split, for a line."""
    ids = torch.randint(model.vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    generation = GenerationOptions(max_new_tokens=run.options.new, ignore_eos=True)
    found: dict[str, list[Any]] = {}

    def turn(name: str) -> Callable[[int], float]:
        decode = DecodeOptions(name=DecodeName[name])
        engine = Engine(model, ranks, partition=from_ratios([first, 1 - first]), decode=decode)

        def timed(_: int) -> float:
            batch = engine.generate([ids], generation)
            assert batch.tpot_s is not None
            found[name] = [batch, [rank.kv_peak_bytes for rank in batch.ranks]]
            tokens.append(batch.generations[0].new_token_ids)
            return batch.tpot_s

        return timed

    tokens: list[list[int]] = []
    seconds = run.in_turn({each.name: turn(each.name) for each in DecodeName}, run.options.rounds, warmup=1)
    partition = ContextPartition(boundaries=tuple(found["sharded"][0].boundaries))
    return {
        "tpot_s": seconds,
        "auto": found["auto"][0].decode,
        "same_tokens": all(each == tokens[0] for each in tokens),
        "kv_peak_bytes": found["sharded"][1],
        "expected_bytes": expected_bytes(model, partition, run.options.new),
        "kv_peak_bytes_last": found["last"][1],
    }


def expected_bytes(model: Model, partition: ContextPartition, num_new: int) -> list[int]:
    """Bytes of keys and values of each rank: its shard in all layers, and a ring of layers of the prefix."""
    in_flight, shapes = PrefillOptions().layers_in_flight, model.kv_shapes
    ring = in_flight * shapes[0].bytes_per_token()
    shard_of = shards(partition, num_new - 1)
    return [shard_bytes(shapes, shard, 1) + shard.chunk.start * ring for shard in shard_of.values()]


def table(found: list[Line]) -> str:
    """Time per token of decode=last over that of the other two, round by round."""
    told = []
    for line in newest(found, "length", "first", "new").values():
        seconds = line["tpot_s"]
        told.append(
            f"{line['length']} tokens, {line['first']:.0%} on the first rank, {line['dtype']}: last "
            f"{median(seconds['last']) * 1e3:.1f} ms per token; tokens are {'' if line['same_tokens'] else 'NOT '}equal"
        )
        for name in ("sharded", "auto"):
            chosen = f" (chose {line['auto']})" if name == "auto" else ""
            told.append(
                f"  {name}{chosen} {median(seconds[name]) * 1e3:.1f} ms, "
                f"{times_as_fast(seconds[name], seconds['last'], 'last')}; n = {len(seconds[name])}"
            )
        bytes_agree = line["kv_peak_bytes"] == line["expected_bytes"]
        told.append(
            f"  KV of each rank {line['kv_peak_bytes']} bytes, {'as' if bytes_agree else 'NOT as'} expected; "
            f"with decode=last {line['kv_peak_bytes_last']}"
        )
    return "\n".join(told)


STUDY = Study(
    name="ranks.sharded_decode",
    text=__doc__,
    has="tpot_s",
    measure=measure,
    table=table,
    options={
        "lengths": option([1024, 4096, 8000], "prompt lengths in tokens"),
        "first": option([0.5, 0.63], "shares of the prompt of the first rank"),
        "new": option(32, "new tokens per answer"),
        "rounds": option(5, "answers of each way, after one that does not count"),
    },
)

if __name__ == "__main__":
    STUDY.main()
