"""Runs of variants on live ranks, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from benchmarks.ttft.options import BenchRun
from benchmarks.ttft.references import PlainTransformers, compute_only_s
from benchmarks.ttft.traffic import wire_bytes
from benchmarks.ttft.variants import BOUND, VARIANTS, Split, Traffic
from runahead import context
from runahead.config import GenerationOptions, PrefillName, PrefillOptions
from runahead.context import ContextPartition, Partitioner
from runahead.engine import Engine
from runahead.failures import RunFailure
from runahead.model.loading.memory import PeakMemory
from runahead.model.model import Model
from runahead.model.shares import load_model
from runahead.pipeline.stage import load_stage
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurement of one prompt's first token.

    Attributes:
        first_token: its id; None where a variant does not report it.
        boundaries: boundaries of the context partition; None without one.
        sent_bytes: bytes of keys and values sent by all ranks together; None where other data is sent.
        wire_bytes: bytes sent by the ranks' network cards; None where the cards serve other processes too.
        kv_peak_bytes, peak_bytes: peak memory by rank, of the KV cache and in total.
        kv_kept_bytes: KV cache bytes after the first token, all ranks together.
    """

    ttft_s: float
    first_token: int | None = None
    boundaries: list[int] | None = None
    sent_bytes: int | None = 0
    wire_bytes: int | None = None
    kv_peak_bytes: list[int]
    kv_kept_bytes: int = 0
    peak_bytes: list[int] = field(default_factory=list)


class Contenders:
    """The variants of a benchmark, ready to run. Every rank makes the same calls.

    Variants that distribute the model over the ranks, and plain transformers, load the weights once more.

    Args:
        given: the partitioner of the option partition=...

    Attributes:
        splits: partitions by variant and prompt length, where the variant does not have its own or `given`.
        memory: peak memory of this rank.

    Raises:
        ValueError: a variant cannot run this model on these ranks, or the weights do not fit in memory once more.
    """

    def __init__(self, run: BenchRun, model: Model, ranks: Ranks, given: Partitioner) -> None:
        self._model, self._ranks, self._given = model, ranks, given
        self.splits: dict[tuple[str, int], ContextPartition] = {}
        self.memory = PeakMemory(ranks.device)
        self._engines: dict[str, Engine] = {}
        self._plain: PlainTransformers | None = None
        for name in run.bench.variants:
            if name == BOUND:
                continue
            options = prefill_options(name, run.prefill.layers_in_flight)
            if options is None:
                self._plain = ranks.on_all_ranks("plain transformers", lambda: _plain(run, ranks))
                continue
            own = model
            if options.name is PrefillName.tensor:
                ranks.arrange(ranks.size)
                own = load_model(run.model, ranks, profile=run.profile)
            elif options.name is PrefillName.pipeline:
                own = load_stage(run.model, ranks, profile=run.profile)
            policies = RankPolicies.everywhere(VARIANTS[name].policies)
            # As it is, since partition=auto learns from what the engine tells it.
            split = given if VARIANTS[name].split is Split.given else partial(self._split, name)
            # Nothing is lent: a speed-up is over one rank with the threads of each.
            make = partial(Engine, own, ranks, prefill=options, partition=split, policies=policies, lends=False)
            self._engines[name] = ranks.on_all_ranks("the variants", make)
            ranks.arrange(1)

    def run(self, name: str, ids: list[int]) -> Measurement:
        """Run a variant once.

        Raises:
            PeerFailure: as for `Engine.generate`.
        """
        self.memory.reset()
        before = wire_bytes(self._ranks)
        found = self._run(name, ids)
        after = wire_bytes(self._ranks)
        shared = self._ranks.gather(
            (self.memory.peak_bytes(), None if before is None or after is None else after - before), "a run's figures"
        )
        wire = [sent for _, sent in shared if sent is not None]
        return replace(
            found,
            wire_bytes=sum(wire) if len(wire) == len(shared) else None,
            peak_bytes=[peak for peak, _ in shared],
        )

    def _run(self, name: str, ids: list[int]) -> Measurement:
        """Run a variant; what is the same for all variants is not measured yet."""
        ranks = self._ranks
        if name == BOUND:
            partition = self._split(name, len(ids), ranks.size)
            ttft_s = compute_only_s(self._model, ranks, ids, partition)
            return Measurement(ttft_s=ttft_s, boundaries=list(partition.boundaries), kv_peak_bytes=[0] * ranks.size)
        if name not in self._engines:

            def first_token() -> tuple[int, float]:
                assert self._plain is not None
                return self._plain.first_token(ids)

            ranks.barrier("all ranks to be idle")  # while rank 0 generates
            token, ttft_s = ranks.on_rank_0("plain transformers", first_token)
            return Measurement(ttft_s=ttft_s, first_token=token, kv_peak_bytes=[0] * ranks.size)
        engine = self._engines[name]
        ranks.arrange(engine.model.num_shards)
        batch = engine.generate([ids], GenerationOptions(max_new_tokens=1))
        ranks.arrange(1)
        activations = VARIANTS[name].traffic is Traffic.activations
        return Measurement(
            ttft_s=batch.ttft_s,
            first_token=batch.generations[0].new_token_ids[0],
            boundaries=batch.boundaries,
            sent_bytes=None if activations else sum(rank.kv_sent_bytes for rank in batch.ranks),
            kv_peak_bytes=[rank.kv_peak_bytes for rank in batch.ranks],
            kv_kept_bytes=sum(rank.kv_kept_bytes for rank in batch.ranks),
        )

    def _split(self, name: str, num_tokens: int, num_ranks: int) -> ContextPartition:
        if (name, num_tokens) in self.splits:
            return self.splits[name, num_tokens]
        if VARIANTS[name].split is Split.even:
            return context.even(num_tokens, num_ranks)
        return self._given(num_tokens, num_ranks)


def _plain(run: BenchRun, ranks: Ranks) -> PlainTransformers | None:
    if ranks.rank != 0:
        return None
    return PlainTransformers(run.model, device=ranks.device, num_threads=ranks.size * torch.get_num_threads())


def prefill_options(name: str, layers_in_flight: int) -> PrefillOptions | None:
    """Prefill options of a variant; None if the engine does not run it."""
    chosen = VARIANTS[name].prefill
    return None if chosen is None else PrefillOptions(layers_in_flight=layers_in_flight, **chosen)  # type: ignore[arg-type]


def check_agreement(tokens: Mapping[str, int | None], length: int) -> None:
    """Check that exact variants computed the same first token; others may differ.

    Raises:
        ValueError: exact variants differ; names them and their first tokens.
    """
    by_token: dict[int, list[str]] = {}
    for name, token in tokens.items():
        if token is not None and VARIANTS[name].is_exact:
            by_token.setdefault(token, []).append(name)
    if len(by_token) > 1:
        told = "; ".join(f"{', '.join(names)}: {token}" for token, names in by_token.items())
        raise RunFailure(
            f"first tokens differ at {length} tokens ({told}); the variants must agree, so nothing was kept"
        )
