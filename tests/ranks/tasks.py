"""Tasks of the ranks of a `RankPool`: top-level functions, since they run in other processes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runahead import ContextPartition, Engine, GenerationOptions, Model, PrefillOptions, Ranks, even
from runahead.cache.attention import LayerCall
from runahead.cache.slabs import Slabs
from runahead.config import DecodeName, DecodeOptions
from runahead.context import Partitioner
from runahead.prefill import PREFILLS, PrefillJob, PromptBatch
from runahead.prefill.base import Prefilled
from runahead.prefill.chain_run import ChainRun
from runahead.prefill.scoring import PromptScorer
from runahead.report import GenerationBatch, PromptLogprobs, RankReport
from runahead.thinning.rank_policies import RankPolicies
from tests.families import Float64, build, rounded, throughout


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> Model:
    """A family's model, made once per process: later tests run on a model that has seen the earlier ones' prompts."""
    module = rounded(family, dtype=dtype)
    with throughout(dtype):
        model = Model(module, name=family)
    with Float64.suspended():
        _ = model.fingerprint  # in float64 throughout it would be another
    return model


@dataclass(kw_only=True)
class PrefillOutcome:
    """Outcome of a prefill on one rank. Logits (B, V) as lists, on the last rank of the chain only."""

    logits: list[list[float]] | None
    holds_cache: bool
    chunk_tokens: int
    kv_sent_bytes: int
    kv_received_bytes: int
    kv_peak_bytes: int

    @classmethod
    def after(cls, done: Prefilled) -> PrefillOutcome:
        return cls(
            logits=None if done.logits_BV is None else done.logits_BV.tolist(),
            holds_cache=done.cache is not None,
            chunk_tokens=done.report.chunk_tokens,
            kv_sent_bytes=done.report.kv_sent_bytes,
            kv_received_bytes=done.report.kv_received_bytes,
            kv_peak_bytes=done.report.kv_peak_bytes,
        )


def prefill(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    boundaries: tuple[int, ...],
    options: PrefillOptions,
    num_new: int = 1,
    dtype: torch.dtype = torch.float64,
) -> PrefillOutcome:
    """Prefill prompts, split as the boundaries say, with room for new tokens."""

    def split(num_tokens: int, num_ranks: int) -> ContextPartition:
        return ContextPartition(boundaries=boundaries).check(num_tokens, ranks.size)

    return prefilled(ranks, tiny_model(family, dtype), prompts, options, num_new, split)


def prefilled(
    ranks: Ranks,
    model: Model,
    prompts: list[list[int]],
    options: PrefillOptions,
    num_new: int = 1,
    chosen: Partitioner = even,
) -> PrefillOutcome:
    """Prefill prompts by the options' strategy, split as it does with the chosen partitioner."""
    strategy, batch = PREFILLS[options.name].of(options), PromptBatch.from_prompts(prompts, ranks.device)
    job = PrefillJob(
        model=model,
        ranks=ranks,
        batch=batch,
        partition=strategy.split(batch.num_tokens, ranks.size, chosen),
        capacity=batch.num_tokens + num_new - 1,
        options=options,
    )
    with throughout(model.dtype):
        return PrefillOutcome.after(strategy.run(job))


def score(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    boundaries: tuple[int, ...],
    options: PrefillOptions,
    number: int,
) -> list[list[PromptLogprobs]]:
    """Log-probabilities of the tokens of prompts that this rank scores, with so many of the most likely ones."""
    model, batch = tiny_model(family), PromptBatch.from_prompts(prompts, ranks.device)
    scorer = PromptScorer(model, batch.ids_BS, batch.pads, number)
    job = PrefillJob(
        model=model,
        ranks=ranks,
        batch=batch,
        partition=PREFILLS[options.name]().split(
            batch.num_tokens, ranks.size, lambda *_: ContextPartition(boundaries=boundaries)
        ),
        capacity=batch.num_tokens,
        options=options,
        scorer=scorer,
        chunk_tokens=options.chunk_tokens,
    )
    with throughout(model.dtype):
        PREFILLS[options.name]().run(job)
        return scorer.found()


Steps = list[list[int | None]]


class Letters:
    """A tokenizer of a kind: token 33 + n is the n-th character behind "!", which is all that stop strings need."""

    all_special_tokens: ClassVar[list[str]] = []
    all_special_ids: ClassVar[list[int]] = []

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(33 + token) for token in ids)


def generate(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    boundaries: tuple[int, ...] | None = None,
    prefill: PrefillOptions | None = None,
    first_index: int = 0,
    eos: list[int] | None = None,
    decode: DecodeName = DecodeName.auto,
    draft: RankPolicies | None = None,
) -> tuple[GenerationBatch, Steps]:
    """Result of `Engine.generate` on this rank, and the calls of `on_tokens` there.

    Chunks are even by default; `eos` are the tokens that end a row, none by default.
    """
    model = tiny_model(family)
    partition = even if boundaries is None else lambda *_: ContextPartition(boundaries=boundaries)
    decoding = DecodeOptions(name=decode)
    engine = Engine(model, ranks, prefill=prefill, partition=partition, decode=decoding, draft=draft)
    steps: Steps = []
    with (
        throughout(model.dtype),
        mock.patch.object(model.module.generation_config, "eos_token_id", eos or []),
        mock.patch.object(model, "tokenizer", Letters() if options.stop else None),
    ):
        return engine.generate(prompts, options, on_tokens=steps.append, first_index=first_index), steps


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of tensors and number of threads in this process."""

    tensor_bytes: int
    num_threads: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return cls(tensor_bytes=sum(storages.values()), num_threads=threading.active_count())


def footprints_over_calls(
    ranks: Ranks, family: str, batches: list[list[list[int]]], options: GenerationOptions, rounds: list[int]
) -> list[Footprint]:
    """Footprints after so many rounds, in each of which one engine generates from every batch."""
    engine = Engine(tiny_model(family), ranks)
    footprints = []
    with only_new_objects():
        for done in range(1, rounds[-1] + 1):
            for prompts in batches:
                engine.generate(prompts, options)
            if done in rounds:
                footprints.append(Footprint.now())
    return footprints


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Hides what is alive already from the garbage collector; looking at the rest is a hundred times faster."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def slots_of(slabs: Slabs) -> list[torch.Tensor]:
    """Memory that layers take in turn: the largest of those that take the same."""
    each = [slab.slab_TBKX for slab in slabs.by_layer]
    return [max(each[slot :: slabs.num_slabs], key=lambda slab: slab.nbytes) for slot in range(slabs.num_slabs)]


@contextmanager
def slots_noted() -> Iterator[Callable[[], int]]:
    """Context manager that notes the slots of all slabs that are made. Yields the bytes of those that are alive."""
    slots: list[tuple[StorageWeakRef, int]] = []
    empty_slabs = Slabs.empty

    def noted(*args: Any, **kwargs: Any) -> Slabs:
        slabs = empty_slabs(*args, **kwargs)
        slots.extend((StorageWeakRef(slot.untyped_storage()), slot.nbytes) for slot in slots_of(slabs))
        return slabs

    with mock.patch.object(Slabs, "empty", noted):
        yield lambda: sum(num_bytes for storage, num_bytes in slots if not storage.expired())


def kv_bytes_in_layers(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    boundaries: tuple[int, ...],
    prefill: PrefillOptions | None = None,
    decode: DecodeName = DecodeName.auto,
) -> tuple[list[int], int, RankReport]:
    """Bytes of K,V alive on this rank in every layer of the prefill, those alive after the call, and its report."""
    sizes: list[int] = []
    before_save = ChainRun.before_save

    def look_before(self: ChainRun, call: LayerCall) -> None:
        sizes.append(live_bytes())
        before_save(self, call)

    partition = ContextPartition(boundaries=boundaries)
    engine = Engine(
        tiny_model(family),
        ranks,
        prefill=prefill,
        partition=lambda *_: partition,
        decode=DecodeOptions(name=decode),
    )
    with (
        slots_noted() as live_bytes,
        mock.patch.object(ChainRun, "before_save", look_before),
        throughout(torch.float64),
    ):
        batch = engine.generate(prompts, options)
    gc.collect()
    return sizes, live_bytes(), batch.ranks[ranks.rank]


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns while it is open; slots for K,V, which are bytes, aside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            is_slot = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.uint8
            if isinstance(leaf, torch.Tensor) and not is_slot and leaf.numel() > self.num_elements:
                self.num_elements, self.operation = leaf.numel(), f"{func} {tuple(leaf.shape)}"
        return result


def largest_tensor(
    ranks: Ranks, family: str, prompts: list[list[int]], options: GenerationOptions, config: dict[str, Any]
) -> tuple[int, str]:
    """Elements of the largest tensor of a generation on this rank, and the operation that it came from."""
    engine = Engine(Model(build(family, dtype=torch.float32, **config)), ranks)
    with LargestTensor() as largest:
        engine.generate(prompts, options)
    return largest.num_elements, largest.operation
