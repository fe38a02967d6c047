"""Decoding with the KV cache in host memory on a GPU: time per token against the bound of memory and host link.

    python -m benchmarks.studies.offloading --shape llama2-7b --contexts 2048 8192 32768 --batch 1 4 20
    python -m benchmarks.studies.offloading --shape llama2-13b --layers 10 --trace trace.json
    python -m benchmarks.studies.offloading --draw-only

Weights, keys and values are random, in a real model's shapes: the time of a decoding step does not depend on their
values, and no prompt has to be computed first. The values determine how many tokens are within alpha: with random keys
more than max_fetch allows, so that "infinigen" is measured while it fetches as much as it may.

The rates of the device's memory and of the host's link are measured first. A step reads every byte that it needs at
least once: weights, indices and the attended keys and values in the device's memory, fetched ones over the link. The
bound is the longer of the two times. Variants run in turn, a few tokens each, round after round, on the same KV cache
in host memory (transformers' cache has its own). Appends a JSON line per variant to benchmarks/results/offloading.jsonl
and draws docs/studies/offloading.png from these lines.
"""

# Legend: B batch, N query heads, K kv heads, n stored tokens, C new tokens, V vocabulary.

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.evaluation.tasks.base import now_s
from benchmarks.harness.declared import Curves, Panel, Table
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, in_turn, newest, option
from benchmarks.studies.retrieved_prompt import (
    Decoding,
    FullCache,
    fetched_share,
    full_bytes,
    kv_bytes,
    retrieved_bytes,
)
from partitioner.table.fingerprint import device_name
from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.quest import Quest
from policies.retriever import Retriever
from runahead import Model
from runahead.attention.partial import AttentionTerms
from runahead.cache.host.copy_stream import copies_for
from runahead.cache.host.layer import HostLayer
from runahead.cache.host.memory import host_empty
from runahead.cache.kept import KeptLayer
from runahead.model.seam import ATTENTION_NAME, set_attention
from runahead.picture_style import set_lengths
from runahead.retrieval.cache import RetrievedCache
from runahead.thinning.rank_policies import RankPolicies

SHAPES: dict[str, dict[str, int]] = {
    "llama2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama2-13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FULL, TRANSFORMERS = "full", "transformers offloaded"
POLICIES: dict[str, Callable[[argparse.Namespace], Retriever]] = {
    "infinigen": lambda options: InfiniGen(min_tokens=0, alpha=options.alpha, max_fetch=options.fetch),
    "infinigen, fixed": lambda options: InfiniGen(min_tokens=0, fetch=options.fetch),
    "infinigen, fixed, 3 layers whole": lambda options: InfiniGen(min_tokens=0, fetch=options.fetch, first_layer=3),
    "quest": lambda options: Quest(min_tokens=0, fetch=options.fetch),
    "exact top-k": lambda options: ExactTopK(min_tokens=0, fetch=options.fetch),
    "offload": lambda options: Offload(),
}
VARIANTS = (FULL, *POLICIES, TRANSFORMERS)
TRACED = "infinigen, fixed"
OBSERVED = 256
"""Number of random queries from which indices are made."""
MACHINE = ("device", "shape", "layers", "dtype")
"""Fields of a line that agree in all that is drawn together."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of decoding one token per row.

    Attributes:
        device, link: least bytes that one step moves: in the device's memory, and from the host to it.
        kv_device, kv_host: KV cache on the device and on the host.
    """

    device: int
    link: int = 0
    kv_device: int = 0
    kv_host: int = 0

    def seconds(self, rates: dict[str, float | None]) -> float:
        """Time of a step in seconds at the measured rates, with both transfers in parallel."""
        memory, link = rates["memory_gbs"], rates["link_gbs"]
        assert memory is not None
        return max(self.device / memory, 0.0 if link is None else self.link / link) / 1e9


class Decoder(Protocol):
    """Interface of a variant of decoding: stores a KV cache and decodes one token per row from it."""

    def take(self, layer: int, base: KeptLayer, host: HostLayer | None, q_BNwH: Tensor) -> None:
        """Store a layer's keys and values: on the device, and on the host if that is a separate memory."""
        ...

    def step(self, ids_B1: Tensor) -> Tensor:
        """Decode one token per row. Returns logits (B, V)."""
        ...

    def used(self) -> tuple[Bytes, float | None]:
        """Bytes, and the share of the stored tokens that was fetched, a mean over all layers, or None."""
        ...


class FullOnDevice(FullCache):
    """All keys and values in the device's memory, as the engine decodes without a policy."""

    def take(self, layer: int, base: KeptLayer, host: HostLayer | None, q_BNwH: Tensor) -> None:
        self.store(layer, base)

    def used(self) -> tuple[Bytes, None]:
        step = full_bytes(self.model, self.num_tokens, len(self.pads))
        return Bytes(device=step, kv_device=self.cache.num_bytes), None


class Retrieved(Decoding):
    """Decoding under a policy that retrieves."""

    cache: RetrievedCache

    def __init__(self, model: Model, policy: Retriever, *, num_tokens: int, batch: int, room: int) -> None:
        cache = RankPolicies.everywhere([policy]).cache(model, batch=batch)
        super().__init__(model, cache, num_tokens=num_tokens, batch=batch)
        self._room = room

    def take(self, layer: int, base: KeptLayer, host: HostLayer | None, q_BNwH: Tensor) -> None:
        self.cache.layers[layer] = replace(base)
        last = torch.arange(self.num_tokens - q_BNwH.shape[2], self.num_tokens, device=self.model.device)
        positions_Bw, terms = last.expand(len(self.pads), -1), AttentionTerms(scaling=base.shape.key_dim**-0.5)
        retrieval = self.cache.retrieval
        retrieval.store_prompt(layer, q_BNwH, positions_Bw, terms, room=self._room, was_cut=False)
        if host is not None and retrieval.in_pool[layer]:
            self.cache.layers[layer] = replace(host, placed_TBK=base.positions_TBK.clone())

    def used(self) -> tuple[Bytes, float]:
        device, link = retrieved_bytes(self.model, self.cache)
        host_bytes = self.cache.retrieval.host_bytes
        used = Bytes(device=device, link=link, kv_device=self.cache.num_bytes, kv_host=host_bytes)
        return used, fetched_share(self.cache)


class TransformersOffloaded:
    """Decoding with transformers' offloaded cache, which copies all keys and values in and out in every step.

    Raises:
        ValueError: the cache cannot run on this device.
    """

    def __init__(self, model: Model, *, batch: int) -> None:
        if model.device.type != "cuda":
            raise ValueError("it copies on CUDA streams, which a CPU does not have")
        self.model, self.batch = model, batch
        self.cache = DynamicCache(config=model.config, offloading=True)

    def take(self, layer: int, base: KeptLayer, host: HostLayer | None, q_BNwH: Tensor) -> None:
        k_BKnH, v_BKnV = base.slab().read(base.first, base.end)
        self.cache.update(k_BKnH.contiguous(), v_BKnV.contiguous(), layer)

    @torch.inference_mode()
    def step(self, ids_B1: Tensor) -> Tensor:
        set_attention(self.model.module, "sdpa")
        try:
            found = self.model.module(input_ids=ids_B1, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        finally:
            set_attention(self.model.module, ATTENTION_NAME)
        logits: Tensor = found.logits
        return logits[:, -1]

    def used(self) -> tuple[Bytes, float]:
        num_tokens = self.cache.get_seq_length()
        step, stored = full_bytes(self.model, num_tokens, self.batch), num_tokens * kv_bytes(self.model, self.batch)
        on_device = 2 * stored // self.model.num_layers  # a layer and the next one
        return Bytes(device=step, link=stored, kv_device=on_device, kv_host=stored), 1.0


def variants(options: argparse.Namespace) -> Iterator[Variant]:
    """Each batch with each context. Raises: ValueError: an option is out of range."""
    if min(options.rounds, options.tokens, *options.contexts, *options.batch) < 1 or min(options.contexts) < OBSERVED:
        raise ValueError(f"--rounds, --tokens and --batch must be at least 1, --contexts at least {OBSERVED}")
    for batch, context in product(options.batch, options.contexts):
        yield {"context": context, "batch": batch}


@dataclass
class Bench:
    """A model on a device whose rates are measured.

    Attributes:
        about: fields of every line.
        trace: file for a trace, until it is written.
    """

    model: Model
    rates: dict[str, float | None]
    about: Line
    trace: Path | None


@contextmanager
def bench(options: argparse.Namespace) -> Iterator[Bench]:
    """The model and the device of a run. Raises: ValueError: the shape has not so many layers."""
    device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        torch.set_num_threads(1)
    model, rates = random_model(options, device), measured_rates(device)
    about = {"device": device_name(device), "layers": model.num_layers, "kv": "random", **rates}
    about |= {name: getattr(options, name) for name in ("shape", "dtype", "alpha", "fetch")}
    link = "" if rates["link_gbs"] is None else f", host to device {rates['link_gbs']:.1f} GB/s"
    print(f"{about['device']}: memory {rates['memory_gbs']:.0f} GB/s{link}")
    yield Bench(model, rates, about, options.trace)


def measure(options: argparse.Namespace, on: Bench, variant: Variant) -> Iterator[Line]:
    """Measure one line per variant of decoding, all in turn."""
    turns = Turns(on.model, options, **variant)
    measured = [on.about | {"variant": name} | variant | line for name, line in turns.measure(on.rates).items()]
    if measured:
        print(TABLE(measured), end="")
    yield from measured
    if on.trace is not None and turns.variants:
        trace(turns, on.trace)
        on.trace = None


def random_model(options: argparse.Namespace, device: torch.device) -> Model:
    """Make a Llama model of the requested shape with random weights. Raises: ValueError: invalid number of layers."""
    shape = dict(SHAPES[options.shape])
    if options.layers is not None:
        if not 1 <= options.layers <= shape["num_hidden_layers"]:
            raise ValueError(f"--layers {options.layers} must be 1 to {shape['num_hidden_layers']} for {options.shape}")
        shape["num_hidden_layers"] = options.layers
    config = LlamaConfig(**shape, vocab_size=32000, max_position_embeddings=max(32768, 2 * max(options.contexts)))
    torch.manual_seed(0)
    with torch.device(device), torch.inference_mode(False):
        module = LlamaForCausalLM._from_config(config, dtype=DTYPES[options.dtype])
    return Model(module.eval().to(device), name=options.shape)


class Turns:
    """Variants that decode in turn, after the same random keys and values."""

    @torch.inference_mode()
    def __init__(self, model: Model, options: argparse.Namespace, *, context: int, batch: int) -> None:
        self.model, self.options, self.context, self.batch = model, options, context, batch
        self.room = options.tokens * (options.rounds + 2)
        self.variants: dict[str, Decoder] = {}
        on_host = (TRANSFORMERS in options.variants) + bool({*options.variants} & POLICIES.keys())
        needed = on_host * (context + self.room) * kv_bytes(model, batch)
        if needed > 0.9 * psutil.virtual_memory().available:
            self._skip("all", f"{needed:,} bytes of K,V do not fit into host memory")
            return
        self._make([*options.variants])

    def _make(self, names: list[str]) -> None:
        """Make the variants that fit in memory; one with its KV cache on the device may leave no room for others."""
        for name in names:
            try:
                self.variants[name] = self._made(name)
            except (ValueError, torch.OutOfMemoryError) as error:
                self._skip(name, str(error).splitlines()[0])
        try:
            self._fill()
            return
        except (ValueError, torch.OutOfMemoryError) as error:
            left_out = FULL if FULL in self.variants else "all"
            self._skip(left_out, str(error).splitlines()[0])
        self.variants.clear()
        if left_out == FULL:
            self._make([name for name in names if name != FULL])

    def _made(self, name: str) -> Decoder:
        if name == TRANSFORMERS:
            return TransformersOffloaded(self.model, batch=self.batch)
        sizes = {"num_tokens": self.context, "batch": self.batch, "room": self.room}
        if name == FULL:
            return FullOnDevice(self.model, **sizes)
        return Retrieved(self.model, POLICIES[name](self.options), **sizes)

    def _skip(self, name: str, why: str) -> None:
        print(f"{self.context:,} tokens x {self.batch}: {name} left out: {why}", file=sys.stderr)

    def _fill(self) -> None:
        """Fill all layers with normally distributed keys, values and queries."""
        model, copies, device = self.model, copies_for(self.model.device), self.model.device
        heads, observed = model.config.num_attention_heads, min(OBSERVED, self.context)
        for layer, shape in enumerate(model.kv_shapes):
            base = KeptLayer.empty(shape, batch=self.batch, room=self.context + self.room, device=device)
            base.slab_TBKX.normal_()
            base.positions_TBK.copy_(torch.arange(len(base.positions_TBK), device=device)[:, None, None])
            base.num_slots = self.context
            host = None
            if copies is not None:
                host = HostLayer.copied_from(replace(base), copies, room=self.room, spare=self.room)
            q_BNwH = torch.randn(self.batch, heads, observed, shape.key_dim, dtype=shape.dtype, device=device)
            for variant in self.variants.values():
                variant.take(layer, base, host, q_BNwH)

    def turn(self, variant: Decoder) -> tuple[float, int | None]:
        """Time per token of one turn in seconds, and on a GPU the peak of the bytes that it allocated."""
        device = self.model.device
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        ids_B1 = torch.full((self.batch, 1), 7, device=device)
        began_s = now_s(device)
        for _ in range(self.options.tokens):
            ids_B1 = variant.step(ids_B1).argmax(dim=-1, keepdim=True)
            ids_B1.tolist()  # synchronises, as decoding does where tokens are streamed
        taken_s = (now_s(device) - began_s) / self.options.tokens
        return taken_s, torch.cuda.max_memory_allocated(device) - before if cuda else None

    @torch.inference_mode()
    def measure(self, rates: dict[str, float | None]) -> dict[str, Line]:
        """Let the variants decode in turn. Returns the figures of each."""
        turns = {name: lambda _, it=variant: self.turn(it) for name, variant in self.variants.items()}
        measured: dict[str, Line] = {}
        for name, results in in_turn(turns, self.options.rounds, warmup=1).items():
            used, share = self.variants[name].used()
            measured[name] = {
                "tpot_s": [taken_s for taken_s, _ in results],
                "device_bytes": used.device,
                "link_bytes": used.link,
                "bound_s": used.seconds(rates),
                "kv_device_bytes": used.kv_device,
                "kv_host_bytes": used.kv_host,
                "step_peak_bytes": results[-1][1],
                "fetched_share": share,
            }
        return measured


def measured_rates(device: torch.device) -> dict[str, float | None]:
    """Rates in GB/s of the device's memory (reads and writes) and of copies from pinned host memory; None on a CPU."""
    size = 2**30 if device.type == "cuda" else 2**26
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    memory = 2 * size / best_s(lambda: b.copy_(a), device) / 1e9
    if device.type != "cuda":
        return {"memory_gbs": memory, "link_gbs": None}
    host = host_empty((size,), torch.uint8, device, before_free=lambda: torch.cuda.synchronize(device))
    return {"memory_gbs": memory, "link_gbs": size / best_s(lambda: a.copy_(host, non_blocking=True), device) / 1e9}


def best_s(copy: Callable[[], object], device: torch.device, times: int = 5) -> float:
    taken = []
    for _ in range(times + 1):
        began_s = now_s(device)
        copy()
        taken.append(now_s(device) - began_s)
    return min(taken[1:])


@torch.inference_mode()
def trace(run: Turns, path: Path) -> None:
    """Write a trace of two tokens for Perfetto or chrome://tracing, in which copies have a stream of their own."""
    name = TRACED if TRACED in run.variants else next(iter(run.variants))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.model.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    ids_B1 = torch.full((run.batch, 1), 7, device=run.model.device)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(2):
            run.variants[name].step(ids_B1).argmax(dim=-1).tolist()
    profile.export_chrome_trace(str(path))
    print(f"{path.name}: two tokens of {name}, {run.context:,} tokens x {run.batch}")


def mebibytes(name: str) -> Callable[[Line], str]:
    """A column of bytes."""
    return lambda line: f"{line[name] / 2**20:,.0f} MiB"


TABLE = Table(
    lines=newest(*MACHINE, "batch", "context", "variant"),
    columns={
        "tokens": lambda line: f"{line['context']:,}",
        "batch": lambda line: str(line["batch"]),
        "variant": lambda line: line["variant"],
        "ms a token": lambda line: f"{1e3 * median(line['tpot_s']):.2f}",
        "bound": lambda line: f"{1e3 * line['bound_s']:.2f}",
        "of it": lambda line: f"{line['bound_s'] / median(line['tpot_s']):.0%}",
        "fetched": lambda line: "-" if line["fetched_share"] is None else f"{line['fetched_share']:.1%}",
        "GPU K,V": mebibytes("kv_device_bytes"),
        "host K,V": mebibytes("kv_host_bytes"),
    },
    left=(2,),
)


def last_measured(found: list[Line]) -> list[Line]:
    """The newest lines of the shape and the device that were measured last."""
    return [line for line in TABLE.lines(found) if all(line[name] == found[-1][name] for name in MACHINE)]


def panels(found: list[Line]) -> list[Panel]:
    """One per batch."""
    return [
        Panel(
            f"batch {batch}",
            "ms a token; dotted: bound",
            lambda line: 1e3 * median(line["tpot_s"]),
            bound=lambda line: 1e3 * float(line["bound_s"]),
            shows=lambda line, batch=batch: line["batch"] == batch,  # type: ignore[misc]
        )
        for batch in sorted({line["batch"] for line in found})
    ]


def set_scales(axes: Any, found: list[Line]) -> None:
    """Make both axes logarithmic."""
    set_lengths(axes, sorted({line["context"] for line in found}))
    axes.set_yscale("log")


PICTURE = Curves(
    title="Decoding with K,V in host memory",
    subject=lambda found: "{shape}, {layers} layers, {dtype}, random weights and K,V, {device}".format(**found[-1]),
    lines=last_measured,
    curve=lambda line: line["variant"],
    x_label="tokens in the cache",
    x=lambda line: float(line["context"]),
    panels=panels,
    finish=set_scales,
)

STUDY = Study(
    name="offloading",
    text=__doc__,
    has="variant",
    variants=variants,
    prepare=bench,
    measure=measure,
    table=TABLE,
    options={
        "shape": option("llama2-7b", choices=list(SHAPES)),
        "layers": option(None, "fewer than the shape has", type=int),
        "dtype": option("bf16", choices=list(DTYPES)),
        "contexts": option([2048, 4096, 8192, 16384, 32768]),
        "batch": option([1]),
        "variants": option(list(VARIANTS), choices=VARIANTS, metavar="VARIANT"),
        "alpha": option(InfiniGen().alpha, type=float),
        "fetch": option(0.1, "share of the tokens, at most or always"),
        "rounds": option(7),
        "tokens": option(8, "of one turn"),
        "device": option(None, "by default a GPU if there is one"),
        "trace": option(None, f"a torch profiler trace of {TRACED}, or of the first variant", type=Path),
    },
    pictures={"offloading.png": PICTURE},
)

if __name__ == "__main__":
    STUDY.main()
