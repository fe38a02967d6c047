"""Dimensions of the golden set, and combinations that cover every pair of values that the code takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain, combinations
from typing import Any

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "policy": (
        "none",
        "snapkv",
        "h2o",
        "tova",
        "reencoded",
        "adakv",
        "fastgen",
        "quest",
        "infinigen",
        "retroinfer",
        "infllm",
        "offload",
        "pool",
        "pyramidinfer",
        "sequence",
        "minicache",
        "kvzip",
        "zigzagkv",
        "dms",
    ),
    "family": (
        "llama",  # two query heads per KV head
        "llama_dynamic_ntk",  # angles depend on the length
        "gpt2",  # a KV head for each, learned positions
        "gpt_bigcode",  # one for all
        "gemma3_text",  # windows in two layers of three
        "bloom",  # ALiBi
        "gpt_oss",  # sinks, windows
        "gemma2",  # soft cap, windows
        "deepseek_v3",  # MLA: values of another width
        "gemma4_text",  # the last layers read earlier ones
        "qwen3_dms",  # tokens mark others
    ),
    "bits": ("none", "4", "2", "8"),
    "decode": ("last", "sharded"),
    "ranks": ("1", "2", "3", "1x2", "2x2"),
    "chunks": ("even", "uneven"),
    "rows": ("one", "equal", "padded"),
    "prefill": ("whole", "chunked", "zigzag", "tsp"),
    "reuse": ("none", "prefix tree", "prompt cache", "blend"),
    "speculate": ("none", "lookup", "policy", "model"),
    "use": ("generate", "conversation", "server"),
}
"""Values by dimension, of which the first is the plain one. `ranks` are stages, and ranks that share one (2x2)."""

POLICIES: dict[str, dict[str, Any]] = {
    "none": {"name": "full"},
    "snapkv": {"name": "snapkv", "budget": 24, "window": 4, "kernel": 1},
    "h2o": {"name": "h2o", "budget": 24},
    "tova": {"name": "tova", "budget": 24, "evict_every": 3},
    "reencoded": {"name": "streaming_llm", "budget": 24, "sinks": 2, "positions": "reencoded"},
    "adakv": {"name": "adakv", "scorer": {"name": "snapkv", "budget": 24, "window": 4, "kernel": 1}},
    "fastgen": {"name": "fastgen", "window": 4, "sinks": 2, "frequent": 6, "local": 6, "recovered": 0.3},
    "quest": {"name": "quest", "fetch": 16, "page": 4, "first_layer": 0, "sinks": 2, "recent": 3, "min_tokens": 0},
    "infinigen": {
        "name": "infinigen",
        "fetch": 10,
        "first_layer": 1,
        "ahead": True,
        "first_ahead": 1,
        "sinks": 2,
        "recent": 3,
        "min_tokens": 0,
    },
    "retroinfer": {
        "name": "retroinfer",
        "fetch": 10,
        "cluster": 4,
        "block": 16,
        "first_layer": 0,
        "sinks": 2,
        "recent": 3,
        "min_tokens": 0,
    },
    "infllm": {
        "name": "infllm",
        "fetch": 24,
        "block": 4,
        "representatives": 2,
        "observed": 8,
        "sinks": 4,
        "recent": 8,
        "min_tokens": 0,
    },
    "offload": {"name": "offload", "min_tokens": 0},
    "pool": {"name": "exact_topk", "fetch": 10, "sinks": 2, "recent": 3, "min_tokens": 0, "pool": {"bytes": "52KiB"}},
    "pyramidinfer": {"name": "pyramidinfer", "min_tokens": 8, "mean_keep": 0.6},
    "sequence": {
        "name": "sequence",
        "steps": [{"name": "pyramidinfer", "min_tokens": 8, "mean_keep": 0.7}, {"name": "h2o", "budget": 20}],
    },
    "minicache": {"name": "minicache", "start_share": 0.0, "retain_share": 0.3},
    "kvzip": {"name": "kvzip", "budget": 24, "sinks": 2, "chunk_tokens": 30},
    "zigzagkv": {"name": "zigzagkv", "budget": 24, "window": 4, "kernel": 1},
    "dms": {"name": "dms", "evict_every": 8},
}
"""Options of `policy`, as of the command line, for prompts of 69 tokens. Smoothed scores would have ties: kernel 1."""

Combination = dict[str, str]
"""A value for each dimension, in their order."""
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two dimensions with a value each."""

TRIES = 8
"""Combinations with many missing pairs that are tried for one of them, before plain ones."""
HELPING = ("family", "decode", "ranks")
"""Dimensions in which another value lets pairs go together that do not in the plain combination."""


def pairs_of(combination: Combination) -> set[Pair]:
    return set(combinations(combination.items(), 2))


def every_pair() -> Iterator[Pair]:
    for one, other in combinations(DIMENSIONS, 2):
        for value in DIMENSIONS[one]:
            yield from (((one, value), (other, beside)) for beside in DIMENSIONS[other])


def plain(pair: Iterable[tuple[str, str]] = ()) -> Combination:
    """The plain combination, but for these values."""
    return {name: values[0] for name, values in DIMENSIONS.items()} | dict(pair)


def covering(
    known: Iterable[Combination], is_allowed: Callable[[Combination], bool], seed: int = 0
) -> Iterator[Combination]:
    """Combinations that have, with the known ones, every pair that is allowed: alone, or with one other value.

    Args:
        is_allowed: whether the code takes a combination; asked about each at most once.
    """
    draw, allows = random.Random(seed), _asking_once(is_allowed)
    covered = set[Pair]().union(*map(pairs_of, known))
    missing = dict.fromkeys(pair for pair in every_pair() if pair not in covered)
    refused = {pair for pair in missing if not allows(plain(pair))}
    for pair in [*missing]:
        if pair not in missing:
            continue
        tried = (_filled(pair, missing, refused, draw) for _ in range(TRIES))
        found = next(filter(allows, chain(tried, _nearly_plain(pair))), None)
        if found is not None:
            for each in pairs_of(found):
                missing.pop(each, None)
                refused.discard(each)
            yield found


def _asking_once(is_allowed: Callable[[Combination], bool]) -> Callable[[Combination], bool]:
    verdicts = dict[tuple[str, ...], bool]()

    def allows(combination: Combination) -> bool:
        key = tuple(combination.values())
        if key not in verdicts:
            verdicts[key] = is_allowed(combination)
        return verdicts[key]

    return allows


def _nearly_plain(pair: Pair) -> Iterator[Combination]:
    """The plain combination with a pair, then those with one other value beside."""
    yield plain(pair)
    for name in HELPING:
        if name not in dict(pair):
            yield from (plain((*pair, (name, value))) for value in DIMENSIONS[name][1:])


def _filled(pair: Pair, missing: Container[Pair], refused: Container[Pair], draw: random.Random) -> Combination:
    """A combination with this pair, whose other values are those with most of the missing pairs, in a random order.

    Args:
        refused: pairs that are avoided.
    """
    chosen, others = dict(pair), [name for name in DIMENSIONS if name not in dict(pair)]
    for name in draw.sample(others, len(others)):
        gains = dict[str, int]()
        for value in draw.sample(DIMENSIONS[name], len(DIMENSIONS[name])):
            new = [_ordered((name, value), each) for each in chosen.items()]
            gains[value] = -1 if any(each in refused for each in new) else sum(each in missing for each in new)
        chosen[name] = max(gains, key=gains.__getitem__)
    return {name: chosen[name] for name in DIMENSIONS}


def _ordered(one: tuple[str, str], other: tuple[str, str]) -> Pair:
    places = [*DIMENSIONS]
    return (one, other) if places.index(one[0]) < places.index(other[0]) else (other, one)
