"""What do keys and values in few bits between ranks cost in perplexity, and save in bytes?

    python -m benchmarks.studies.wire_bits --text wikitext2-raw-validation.txt.gz

One process computes what two ranks of a chain do (tests/ranks/test_wire_bits.py): the first chunk of a sample as it is,
then its keys and values are encoded and decoded, then the second chunk, whose tokens are scored. All numbers of bits
read the same samples. TTFT over a slow link is measured by `launch/bench.py` with its variants kvr_8 and kvr_4.
"""

from __future__ import annotations

import gzip
import math
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.harness.declared import Table
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, newest, option
from runahead.cache.attention import CausalAttention
from runahead.cache.kv_cache import KVCache
from runahead.cache.quantised.wire import decode, encode, sent_shape
from runahead.cache.slabs import KVShape
from runahead.config import WIRE_BITS, ModelName, ModelOptions
from runahead.files import read_user_file
from runahead.model.model import Model

SIZES = ("model", "tokens", "boundary")
FIELDS = (*SIZES, "bits")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The model, and the token ids of the text."""

    model: Model
    ids: list[int]


@contextmanager
def prepare(options: Namespace) -> Iterator[Prepared]:
    """Load SmolLM2 and read the text. Raises: ValueError: the text is too short."""
    content = read_user_file(options.text)
    text = (gzip.decompress(content) if options.text.endswith(".gz") else content).decode("utf-8")
    model = Model.load(ModelOptions(name=ModelName.smollm2), torch.device("cpu"))
    needed = options.samples * options.tokens
    ids: list[int] = model.tokenizer(text[: 16 * needed], verbose=False)["input_ids"]
    if len(ids) < needed:
        raise ValueError(f"--text {options.text} has {len(ids):,} tokens, fewer than {needed:,}")
    yield Prepared(model=model, ids=ids)


def variants(options: Namespace) -> Iterator[Variant]:
    """The samples, one after the other."""
    for sample in range(options.samples):
        yield {"model": "SmolLM2", "tokens": options.tokens, "boundary": options.boundary, "sample": sample}


def measure(options: Namespace, prepared: Prepared, variant: Variant) -> Iterator[Line]:
    """The losses of a sample with each number of bits."""
    model, start = prepared.model, variant["sample"] * options.tokens
    ids_1S, boundary = torch.tensor([prepared.ids[start : start + options.tokens]]), options.boundary
    first = model.empty_cache(options.tokens)
    forward(model, first, ids_1S[:, :boundary], 0)
    for bits in (None, *WIRE_BITS):
        cache = first.fork()
        if bits is not None:
            for slab in cache.slabs.by_layer:
                send(slab.tokens(0, boundary), slab.key_dim, bits)
        logits_CV = forward(model, cache, ids_1S[:, boundary:], boundary)[0]
        nll = cross_entropy(logits_CV[:-1], ids_1S[0, boundary + 1 :]).item()
        sent = [sent_shape(shape, bits).bytes_per_token() for shape in model.kv_shapes]
        of_16_bits = [shape.bytes_per_token() * 2 / shape.dtype.itemsize for shape in model.kv_shapes]
        yield variant | {"bits": bits, "nll": nll, "sent_share": sum(sent) / sum(of_16_bits)}


def forward(model: Model, cache: KVCache, ids_1C: Tensor, start: int) -> Tensor:
    """Logits (1, C, V) of tokens after those of the cache."""
    attention = CausalAttention(cache, start=start, pads=[0])
    return model.forward(ids_1C, attention, start=start, pads=[0], all_logits=True)


def send(kv_SBKX: Tensor, key_dim: int, bits: int) -> None:
    """Replace keys and values by what arrives of them."""
    shape: dict[str, Any] = {"num_kv_heads": kv_SBKX.shape[2], "key_dim": key_dim, "dtype": kv_SBKX.dtype}
    width = sent_shape(KVShape(value_dim=kv_SBKX.shape[3] - key_dim, **shape), bits).key_dim
    records_SBKW = torch.empty(*kv_SBKX.shape[:3], width, dtype=torch.uint8)
    encode(kv_SBKX, key_dim, bits, records_SBKW)
    decode(records_SBKW, key_dim, bits, kv_SBKX)


def perplexities(found: list[Line]) -> list[Line]:
    """Of each size and number of bits: perplexity over the newest line of each sample, and its ratio to the exact."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in newest(*FIELDS, "sample")(found):
        groups.setdefault(tuple(line[name] for name in FIELDS), []).append(line)
    means = {key: mean(line["nll"] for line in group) for key, group in groups.items()}
    return [
        dict(zip(FIELDS, key, strict=True))
        | {"samples": len(group), "sent_share": group[0]["sent_share"], "perplexity": math.exp(means[key])}
        | {"change": math.exp(means[key] - means[*key[:-1], None]) - 1}
        for key, group in groups.items()
    ]


TABLE = Table(
    lines=perplexities,
    columns={
        "chunks": lambda line: f"{line['boundary']:,} + {line['tokens'] - line['boundary']:,} tokens",
        "samples": lambda line: str(line["samples"]),
        "bits": lambda line: "exact" if line["bits"] is None else str(line["bits"]),
        "bytes / bfloat16's": lambda line: f"{line['sent_share']:.1%}",
        "perplexity": lambda line: f"{line['perplexity']:.3f}",
        "change": lambda line: f"{line['change']:+.2%}",
    },
)

STUDY = Study(
    name="wire_bits",
    text=__doc__,
    has="nll",
    variants=variants,
    prepare=prepare,
    measure=measure,
    table=TABLE,
    options={
        "text": option("wikitext2-raw-validation.txt.gz", "text file, which may be compressed by gzip"),
        "samples": option(8, "samples of the text"),
        "tokens": option(2048, "of a sample"),
        "boundary": option(1152, "tokens of the first chunk"),
    },
)

if __name__ == "__main__":
    STUDY.main()
