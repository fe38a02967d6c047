"""Keys and values in 4 or 2 bits on a CPU: bytes, time per token and where it goes, and the error of keys.

    python -m benchmarks.studies.quantised --lengths 8000
    python -m benchmarks.studies.quantised --draw-only

A text is read once per dtype. Then single tokens follow it over the full cache and over the same cache in 4 and in 2
bits, in turn, a few tokens each, round after round. A step reads every stored byte once, so the bound of its gain is
the ratio of the bytes of weights and cache. The parts are those of a step's attention, timed apart over the stored
layers with random queries: all of it, unpacking codes to numbers alone (of all keys and values), and the products of
queries with keys and of weights with values, both with their unpacking.

The error of keys is |dequantised - key| / |key| over all quantised tokens of a layer, in groups of 32 tokens of a
channel, as they are stored, and of 32 channels of a token. Appends a JSON line per length, dtype and number of bits to
benchmarks/results/quantised.jsonl.
"""

# Legend: B batch, N query heads, K kv heads, G query heads per KV head, n stored slots, H head dim.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.lines import Line
from benchmarks.harness.machine import compute_as_a_rank
from benchmarks.harness.study import Run, Study, newest, option
from benchmarks.harness.text_samples import EXAMPLE, repeated, text_ids
from benchmarks.harness.text_table import Rows
from benchmarks.studies.retrieved_prompt import FullCache, full_bytes, kv_bytes, turn_of, under_policies, weight_bytes
from launch.program.text_table import text_table
from policies.base import Phase
from runahead import Conversation, Model, ModelOptions
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.groups import ChannelGroups, TokenGroups, blocks
from runahead.cache.quantised.layer import QuantisedLayer, QuantisedRows
from runahead.config import CacheOptions, DType
from runahead.thinning.rank_policies import RankPolicies

CHUNK_TOKENS = 512
"""Tokens of the text that are read at a time."""

PARTS = ("attention", "unpacking", "keys", "values")


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length, dtype and number of bits; 16 or 32 bits are the full cache."""
    options = run.options
    compute_as_a_rank(options.threads)
    for dtype in options.dtypes:
        model = Model.load(ModelOptions(dtype=DType[dtype]), torch.device("cpu"))
        text = text_ids(model, options.text)
        for length in options.lengths:
            ids = repeated(text, length)
            yield from _of_length(run, model, dtype, ids)


def _of_length(run: Run, model: Model, dtype: str, ids: list[int]) -> Iterator[Line]:
    options, exact = run.options, Conversation(model)
    for first in range(0, len(ids), CHUNK_TOKENS):
        exact.feed(torch.tensor([ids[first : first + CHUNK_TOKENS]]))
    assert exact.cache is not None
    full = FullCache.of(exact, options.tokens * (options.rounds + 1))
    bits_full = 8 * model.dtype.itemsize
    follow: dict[int, Callable[[Tensor], Tensor]] = {bits_full: full.follow}
    caches: dict[int, KeptCache] = {bits_full: exact.cache}
    for bits in options.bits:
        quantised = under_policies(exact, RankPolicies(storage=CacheOptions(bits=bits)))
        assert quantised.cache is not None
        quantised.cache.settle(room=0)
        follow[bits], caches[bits] = quantised.follow, quantised.cache
    stored = {bits: cache.num_bytes for bits, cache in caches.items()}
    turns = {str(bits): turn_of(each, ids, options.tokens) for bits, each in follow.items()}
    seconds = run.in_turn(turns, options.rounds, warmup=1)
    of_parts = {str(bits): lambda _, cache=cache: _parts(model, cache) for bits, cache in caches.items()}
    parts = run.in_turn(of_parts, options.rounds, warmup=1)
    for bits in caches:
        line: dict[str, Any] = {
            "model": model.name,
            "dtype": dtype,
            "length": len(ids),
            "bits": bits,
            "kv_bytes": len(ids) * kv_bytes(model, 1) if bits == bits_full else stored[bits],
            "full_bytes": full_bytes(model, len(ids)),
            "weight_bytes": weight_bytes(model),
            "tpot_s": seconds[str(bits)],
            "parts_s": {
                part: [each[part] for each in parts[str(bits)]] for part in PARTS if part in parts[str(bits)][0]
            },
        }
        if bits != bits_full:
            line |= {f"error_by_{name}": _errors(exact.cache, kind, bits) for name, kind in KINDS.items()}
        yield line


KINDS: dict[str, type[ChannelGroups | TokenGroups]] = {"channel": ChannelGroups, "token": TokenGroups}


@torch.inference_mode()
def _parts(model: Model, cache: KeptCache) -> dict[str, float]:
    """Seconds of the parts of one step's attention, over all layers."""
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, run: Callable[[], object]) -> None:
        began_s = time.perf_counter()
        run()
        seconds[part] += time.perf_counter() - began_s

    num_heads = model.config.num_attention_heads
    for layer in cache.layers:
        q_1N1H = torch.randn(1, num_heads, 1, layer.shape.key_dim).to(layer.shape.dtype)
        terms = AttentionTerms(scaling=layer.shape.key_dim**-0.5)
        seen = layer.seen(q_1N1H, NewTokens(layer.num_slots - 1, [0], Phase.decode))
        timed("attention", partial(seen.attend, terms))
        if isinstance(layer, QuantisedLayer):
            for part in layer.parts:
                timed("unpacking", partial(_unpack, part))
                timed("keys", partial(_dot, part, q_1N1H))
                timed("values", partial(_weighted, part, num_heads))
    return seconds if isinstance(cache.layers[0], QuantisedLayer) else {"attention": seconds["attention"]}


def _unpack(part: QuantisedRows) -> None:
    for groups in (part.keys, part.values):
        width = groups.codes_BKTW.shape[3] * 8 // groups.bits
        for first, end in blocks(part.num_tokens):
            groups._unpacked(first, end, torch.float32, width)


def _dot(part: QuantisedRows, q_1N1H: Tensor) -> None:
    assert isinstance(part.keys, ChannelGroups)
    q_BKGH = q_1N1H[:, :, 0].float().unflatten(1, (part.keys.codes_BKTW.shape[1], -1))
    for first, end in blocks(part.num_tokens):
        part.keys.dot(q_BKGH, first, end)


def _weighted(part: QuantisedRows, num_heads: int) -> None:
    num_kv_heads = part.values.codes_BKTW.shape[1]
    for first, end in blocks(part.num_tokens):
        part.values.weighted(torch.rand(1, num_kv_heads, num_heads // num_kv_heads, end - first), first, end)


def _errors(cache: KeptCache, kind: type[ChannelGroups | TokenGroups], bits: int) -> list[float]:
    """Relative error of the keys by layer, over whole groups of tokens."""
    found = []
    for layer in cache.layers:
        keys = layer.read()[0][:, :, : layer.num_slots // 32 * 32].float()
        read = kind.of(keys, bits).read(0, keys.shape[2], torch.float32)
        found.append(((read - keys).norm() / keys.norm()).item())
    return found


def table(found: list[Line]) -> str:
    """A row per length, dtype and number of bits: the last run of each."""
    rows: Rows = [("tokens", "dtype", "bits", "KV MiB", "ms a token", "gain", "bound", *PARTS, "key error", "by token")]
    latest = newest(found, "length", "dtype", "bits")
    for (length, dtype, bits), line in latest.items():
        full = next(each for (n, d, b), each in latest.items() if (n, d) == (length, dtype) and b >= 16)
        gain = median(a / b for a, b in zip(full["tpot_s"], line["tpot_s"], strict=True))
        bound = line["full_bytes"] / (line["weight_bytes"] + line["kv_bytes"])
        parts = [f"{1e3 * median(line['parts_s'][part]):.1f}" if part in line["parts_s"] else "-" for part in PARTS]
        errors = [f"{mean(line[name]):.1%}" if name in line else "-" for name in ("error_by_channel", "error_by_token")]
        rows.append(
            (
                f"{length:,}",
                dtype,
                f"{bits}",
                f"{line['kv_bytes'] / 2**20:.1f}",
                f"{1e3 * median(line['tpot_s']):.1f}",
                f"{gain:.2f}",
                f"{bound:.2f}",
                *parts,
                *errors,
            )
        )
    return text_table(rows, left=(1,))


STUDY = Study(
    name="quantised",
    text=__doc__,
    has="bits",
    measure=measure,
    table=table,
    options={
        "lengths": option([8000], "tokens of the text"),
        "dtypes": option(["float32", "bfloat16"], "dtypes of the model"),
        "bits": option([4, 2], "bits of stored keys and values, each beside the full cache"),
        "rounds": option(5, "rounds that count"),
        "tokens": option(4, "tokens of a turn"),
        "threads": option(1, "threads"),
        "text": option(EXAMPLE, "text to read, repeated as often as needed"),
    },
)


if __name__ == "__main__":
    STUDY.main()
