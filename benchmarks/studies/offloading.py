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
and draws docs/offloading.png from these lines.
"""

# Legend: B batch, N query heads, K kv heads, n stored tokens, C new tokens, V vocabulary.

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option
from benchmarks.studies.retrieval_decode import weight_bytes
from benchmarks.studies.retrieved_prompt import FullCache
from partitioner.table.fingerprint import device_name
from policies.base import Phase
from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.quest import Quest
from policies.retriever import Retriever
from runahead import Model
from runahead.cache.attention import CausalAttention
from runahead.cache.copy_stream import CopyStream, copies_for
from runahead.cache.host_layer import HostLayer
from runahead.cache.host_memory import host_empty
from runahead.cache.kept import KeptLayer
from runahead.model.model import set_attention
from runahead.model.seam import ATTENTION_NAME
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title, tokens
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
LOOKS = {
    FULL: (INK, "o"),
    "infinigen": (ACCENT, "D"),
    "infinigen, fixed": ("#e69f00", "D"),
    "infinigen, fixed, 3 layers whole": ("#cc79a7", "D"),
    "quest": ("#009e73", "^"),
    "exact top-k": ("#0072b2", "v"),
    "offload": (MUTED, "h"),
    TRANSFORMERS: ("#56b4e9", "s"),
}
OBSERVED = 256
"""Number of random queries from which indices are made."""
TOLD_APART = ("device", "shape", "layers", "dtype", "batch")


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Minimum bytes that one step moves: in the device's memory, and from the host to it."""

    device: int
    link: int = 0

    def seconds(self, rates: dict[str, float | None]) -> float:
        """Time in seconds at the measured rates, with both transfers in parallel."""
        memory, link = rates["memory_gbs"], rates["link_gbs"]
        assert memory is not None
        return max(self.device / memory, 0.0 if link is None else self.link / link) / 1e9


class Variant(Protocol):
    """Interface of a variant: stores a KV cache and decodes one token per row from it."""

    def take(self, layer: int, base: KeptLayer, host: HostLayer | None, q_BNwH: Tensor) -> None:
        """Store a layer's keys and values: on the device, and on the host if that is a separate memory."""
        ...

    def step(self, ids_B1: Tensor) -> Tensor:
        """Decode one token per row. Returns logits (B, V)."""
        ...

    def moved(self) -> Bytes: ...

    def kept(self) -> tuple[int, int]:
        """KV cache bytes on the device and on the host."""
        ...

    def fetched_share(self) -> float | None:
        """Share of the stored tokens that was fetched, a mean over all layers; None where nothing is fetched."""
        ...


class FullOnDevice(FullCache):
    """All keys and values in the device's memory, as the engine decodes without a policy."""

    def take(self, layer: int, base: KeptLayer, host: HostLayer | None, q_BNwH: Tensor) -> None:
        self.store(layer, base)

    def moved(self) -> Bytes:
        return Bytes(device=weight_bytes(self.model) + self.num_tokens * kv_bytes(self.model, len(self.pads)))

    def kept(self) -> tuple[int, int]:
        return self.cache.num_bytes, 0

    def fetched_share(self) -> None:
        return None


class Retrieved:
    """Decoding under a policy that retrieves."""

    def __init__(self, model: Model, policy: Retriever, *, context: int, batch: int, room: int) -> None:
        self.model, self.policy, self.num_tokens, self.pads, self._room = model, policy, context, [0] * batch, room
        self.cache = RankPolicies.everywhere([policy]).cache(model, batch=batch)
        assert isinstance(self.cache, RetrievedCache)
        self.retrieval = self.cache.retrieval

    def take(self, layer: int, base: KeptLayer, host: HostLayer | None, q_BNwH: Tensor) -> None:
        self.cache.layers[layer] = replace(base)
        last = torch.arange(self.num_tokens - q_BNwH.shape[2], self.num_tokens, device=self.model.device)
        self.retrieval.store_prompt(
            layer,
            q_BNwH,
            last.expand(len(self.pads), -1),
            base.shape.key_dim**-0.5,
            room=self._room,
            was_cut=False,
        )
        if host is not None and self.retrieval.in_pool[layer]:
            self.cache.layers[layer] = replace(host, positions_TBK=base.positions_TBK.clone())

    def step(self, ids_B1: Tensor) -> Tensor:
        start = self.num_tokens
        self.num_tokens += 1
        attention = CausalAttention(self.cache, start=start, pads=self.pads, phase=Phase.decode)
        return self.model.forward(ids_B1, attention, start=start, pads=self.pads)

    def moved(self) -> Bytes:
        device, link = weight_bytes(self.model), 0
        shares = self.retrieval.report().fetched_share
        heads, dim = self.model.config.num_attention_heads, self.model.config.hidden_size
        for shape, kept, found, share in zip(
            self.model.kv_shapes, self.cache.layers, self.retrieval.layers, shares, strict=True
        ):
            stored = kept.num_slots * shape.bytes_per_token(len(self.pads))
            seen = int(stored * (1.0 if share is None else share))
            fetched = seen if isinstance(kept, HostLayer) else 0
            device += seen
            if found is not None:
                device += found.index.num_bytes
                if self.policy.looks_ahead_on(self.model.device) and self.policy.asks:
                    device += dim * heads * shape.key_dim * shape.dtype.itemsize
                if isinstance(self.policy, ExactTopK):
                    keys = stored * shape.key_dim // (shape.key_dim + shape.value_dim)
                    fetched += keys if isinstance(kept, HostLayer) else 0
                    device += 0 if isinstance(kept, HostLayer) else keys
            link += fetched
        return Bytes(device=device, link=link)

    def kept(self) -> tuple[int, int]:
        return self.cache.num_bytes, self.retrieval.host_bytes

    def fetched_share(self) -> float:
        shares = self.retrieval.report().fetched_share
        return sum(1.0 if share is None else share for share in shares) / len(shares)


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

    def moved(self) -> Bytes:
        stored = self.cache.get_seq_length() * kv_bytes(self.model, self.batch)
        return Bytes(device=weight_bytes(self.model) + stored, link=stored)

    def kept(self) -> tuple[int, int]:
        stored = self.cache.get_seq_length() * kv_bytes(self.model, self.batch)
        return 2 * stored // self.model.num_layers, stored  # a layer and the next one

    def fetched_share(self) -> float:
        return 1.0


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per batch, context and variant. Raises: SystemExit: an option is out of range."""
    options = run.options
    if min(options.rounds, options.tokens, *options.contexts, *options.batch) < 1 or min(options.contexts) < OBSERVED:
        raise SystemExit(f"--rounds, --tokens and --batch must be at least 1, --contexts at least {OBSERVED}")
    device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        torch.set_num_threads(1)
    model = random_model(options, device)
    rates = measured_rates(device)
    about = {
        "device": device_name(device),
        "shape": options.shape,
        "layers": model.num_layers,
        "dtype": options.dtype,
        "kv": "random",
        "alpha": options.alpha,
        "fetch": options.fetch,
        **rates,
    }
    link = "" if rates["link_gbs"] is None else f", host to device {rates['link_gbs']:.1f} GB/s"
    print(f"{about['device']}: memory {rates['memory_gbs']:.0f} GB/s{link}")
    traced = options.trace
    for batch in options.batch:
        for context in options.contexts:
            turns = Turns(model, options, context=context, batch=batch)
            measured = turns.measure(about, rates)
            print(table(measured))
            yield from measured
            if traced is not None and turns.variants:
                trace(turns, traced)
                traced = None


def random_model(options: argparse.Namespace, device: torch.device) -> Model:
    """Make a Llama model of the requested shape with random weights. Raises: SystemExit: invalid number of layers."""
    shape = dict(SHAPES[options.shape])
    if options.layers is not None:
        if not 1 <= options.layers <= shape["num_hidden_layers"]:
            raise SystemExit(f"--layers {options.layers} must be 1 to {shape['num_hidden_layers']} for {options.shape}")
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
        self.variants: dict[str, Variant] = {}
        stored = (context + self.room) * kv_bytes(model, batch)
        needed = stored * sum(name != FULL for name in ({*options.variants} & {FULL, TRANSFORMERS}))
        needed += stored if {*options.variants} & POLICIES.keys() else 0
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

    def _made(self, name: str) -> Variant:
        if name == TRANSFORMERS:
            return TransformersOffloaded(self.model, batch=self.batch)
        if name == FULL:
            return FullOnDevice(self.model, num_tokens=self.context, batch=self.batch, room=self.room)
        policy = POLICIES[name](self.options)
        return Retrieved(self.model, policy, context=self.context, batch=self.batch, room=self.room)

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
            host = None if copies is None else self._on_host(base, copies)
            q_BNwH = torch.randn(self.batch, heads, observed, shape.key_dim, dtype=shape.dtype, device=device)
            for variant in self.variants.values():
                variant.take(layer, base, host, q_BNwH)

    def _on_host(self, base: KeptLayer, copies: CopyStream) -> HostLayer:
        return HostLayer.of(replace(base), copies, room=self.room, spare=self.room)

    def turn(self, variant: Variant) -> float:
        """Time per token of one turn, in seconds."""
        ids_B1 = torch.full((self.batch, 1), 7, device=self.model.device)
        synchronize(self.model.device)
        began_s = time.perf_counter()
        for _ in range(self.options.tokens):
            ids_B1 = variant.step(ids_B1).argmax(dim=-1, keepdim=True)
            ids_B1.tolist()  # synchronises, as decoding does where tokens are streamed
        return (time.perf_counter() - began_s) / self.options.tokens

    @torch.inference_mode()
    def measure(self, about: dict[str, Any], rates: dict[str, float | None]) -> list[Line]:
        seconds: dict[str, list[float]] = {name: [] for name in self.variants}
        peaks: dict[str, int] = {}
        cuda = self.model.device.type == "cuda"
        for number in range(self.options.rounds + 1):
            for name, variant in self.variants.items():
                if cuda:
                    torch.cuda.reset_peak_memory_stats(self.model.device)
                    before = torch.cuda.memory_allocated(self.model.device)
                taken_s = self.turn(variant)
                if number:  # the first turn warms up
                    seconds[name].append(taken_s)
                if cuda:
                    peaks[name] = torch.cuda.max_memory_allocated(self.model.device) - before
        measured: list[Line] = []
        for name, variant in self.variants.items():
            moved, (device_bytes, host_bytes) = variant.moved(), variant.kept()
            measured.append(
                about
                | {"variant": name, "context": self.context, "batch": self.batch, "tpot_s": seconds[name]}
                | {"device_bytes": moved.device, "link_bytes": moved.link, "bound_s": moved.seconds(rates)}
                | {"kv_device_bytes": device_bytes, "kv_host_bytes": host_bytes, "step_peak_bytes": peaks.get(name)}
                | {"fetched_share": variant.fetched_share()}
            )
        return measured


def kv_bytes(model: Model, batch: int) -> int:
    """KV cache bytes of one token in every row, over all layers."""
    return sum(shape.bytes_per_token(batch) for shape in model.kv_shapes)


def measured_rates(device: torch.device) -> dict[str, float | None]:
    """Rates in GB/s of the device's memory (reads and writes) and of copies from pinned host memory; None on a CPU."""
    size = 2**30 if device.type == "cuda" else 2**26
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    memory = 2 * size / best_s(lambda: b.copy_(a), device) / 1e9
    if device.type != "cuda":
        return {"memory_gbs": memory, "link_gbs": None}
    host = host_empty((size,), torch.uint8, device, before_free=lambda: synchronize(device))
    return {"memory_gbs": memory, "link_gbs": size / best_s(lambda: a.copy_(host, non_blocking=True), device) / 1e9}


def best_s(copy: Callable[[], object], device: torch.device, times: int = 5) -> float:
    taken = []
    for _ in range(times + 1):
        synchronize(device)
        began_s = time.perf_counter()
        copy()
        synchronize(device)
        taken.append(time.perf_counter() - began_s)
    return min(taken[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def table(found: Sequence[Line]) -> str:
    """Table of the last measurement of every shape, context, batch and variant."""
    rows = [
        f"{'tokens':>7} {'batch':>5}  {'variant':<33} {'ms a token':>10} {'bound':>8} {'of it':>6} {'fetched':>8}"
        f" {'GPU K,V':>9} {'host K,V':>9}"
    ]
    for (*_, batch, context, name), line in latest(found).items():
        measured_s, share = median(line["tpot_s"]), line["fetched_share"]
        rows.append(
            f"{context:>7,} {batch:>5}  {name:<33} {1e3 * measured_s:>10.2f} {1e3 * line['bound_s']:>8.2f}"
            f" {line['bound_s'] / measured_s:>6.0%} {'-' if share is None else f'{share:.1%}':>8}"
            f" {line['kv_device_bytes'] / 2**20:>5,.0f} MiB {line['kv_host_bytes'] / 2**20:>5,.0f} MiB"
        )
    return "\n".join(rows)


def latest(found: Sequence[Line]) -> dict[tuple[Any, ...], Line]:
    """The last line of each machine, shape, batch, context and variant."""
    return newest(found, *TOLD_APART, "context", "variant")


def picture(found: Sequence[Line]) -> bytes:
    """Draw a panel per batch, for the shape and the device that were measured last."""
    last = found[-1]
    shown = [
        line
        for line in latest(found).values()
        if all(line[name] == last[name] for name in TOLD_APART if name != "batch")
    ]
    batches = sorted({line["batch"] for line in shown})
    figure = new_figure(5.2 * len(batches), 4.4)
    for axes, batch in zip(panels(figure, len(batches), 1, len(batches)), batches, strict=True):
        contexts = sorted({line["context"] for line in shown if line["batch"] == batch})
        for name, (colour, marker) in LOOKS.items():
            of_it = [line for line in shown if line["batch"] == batch and line["variant"] == name]
            if of_it:
                of_it.sort(key=lambda line: int(line["context"]))
                x = [line["context"] for line in of_it]
                axes.plot(x, [1e3 * median(line["tpot_s"]) for line in of_it], color=colour, marker=marker, label=name)
                axes.plot(x, [1e3 * line["bound_s"] for line in of_it], color=colour, linestyle=":")
        dress(axes, title=f"batch {batch}", x="tokens in the cache", y="ms a token; dotted: bound")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [tokens(context) for context in contexts])
    figure.axes[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    about = f"{last['shape']}, {last['layers']} layers, {last['dtype']}, random weights and K,V, {last['device']}"
    set_title(figure, "Decoding with K,V in host memory", about)
    return png(figure)


STUDY = Study(
    name="offloading",
    text=__doc__,
    has="variant",
    measure=measure,
    table=table,
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
    pictures={"offloading.png": picture},
)

if __name__ == "__main__":
    STUDY.main()
