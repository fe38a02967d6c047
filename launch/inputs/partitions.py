"""Context partitions that partition= can name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from launch.inputs.options import PartitionName, PartitionOptions, RunOptions
from launch.program.ending import say
from launch.program.progress import Bar
from runahead import context
from runahead.config import PrefillOptions
from runahead.files import cache_folder
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks

if TYPE_CHECKING:
    from partitioner.cost.streaming import Streams
    from partitioner.table.fingerprint import Fingerprint
    from partitioner.table.lookup_table import LookupTable


class SplitsPrompts(Protocol):
    """Options of a run that say how its prompts are split."""

    prefill: PrefillOptions
    partition: PartitionOptions
    policy: dict[str, Any]


class TablePartition:
    """Splits prompts by a lookup table, and prints each of its warnings once, on rank 0."""

    def __init__(self, table: LookupTable) -> None:
        self.table = replace(table, tell=self._tell)
        self._said: set[str] = set()

    def __call__(self, num_tokens: int, num_ranks: int) -> context.ContextPartition:
        return self.table.partition(num_tokens, num_ranks)

    def check_fits(self, fingerprint: Fingerprint, *, force: bool) -> None:
        """Check that the table is for this model and device.

        Raises:
            ValueError: if it is not, unless `force` is set.
        """
        from partitioner.table.lookup_table import REMEDY

        remedy = f"{REMEDY}, or use this one with partition.force=true"
        self.table.check_fits(fingerprint, force=force, remedy=remedy)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            say(f"warning: {sentence}")


class AutoChoice:
    """partition=auto: even chunks until the model is loaded, then a table that fits, else a split that learns.

    Args:
        tables: the tables that may fit; of rank 0, on every rank.
    """

    def __init__(self, tables: Sequence[LookupTable]) -> None:
        self._tables = tables
        self.chosen: context.Partitioner = context.even

    def __call__(self, num_tokens: int, num_ranks: int) -> context.ContextPartition:
        return self.chosen(num_tokens, num_ranks)

    def decide(self, num_tokens: int, num_ranks: int) -> context.ContextPartition:
        """The same on rank 0 alone."""
        return context.decide(self.chosen, num_tokens, num_ranks)

    def learn(self, partition: context.ContextPartition, compute_s: Sequence[float], wait_s: Sequence[float]) -> None:
        """Pass the times of a prompt on to a split that learns."""
        if isinstance(self.chosen, context.LearningPartitioner):
            self.chosen.learn(partition, compute_s, wait_s)

    def is_alone_sooner(self, partition: context.ContextPartition, num_stored: int) -> bool:
        """Whether the last stage computes a prompt alone sooner, as far as the split knows. Every rank asks."""
        return isinstance(self.chosen, context.KnowsAlone) and self.chosen.is_alone_sooner(partition, num_stored)

    def choose(self, model: Model, ranks: Ranks, run: SplitsPrompts, *, lends: bool = True) -> None:
        """Choose a table that fits, but for a pipeline, or time a few layers. Every rank makes the same call.

        Args:
            lends: as of `prepare_partition`.
        """
        from partitioner.auto.partition import AutoPartition

        streams = _streams(model, ranks, run)
        fingerprint = _fingerprint(model, ranks, run.prefill, streams)
        tables = self._tables if run.prefill.takes_partition else []
        why_not = ranks.on_rank_0(
            "the tables", lambda: [_misfit(table, fingerprint, ranks.num_stages) for table in tables]
        )
        fitting = [table for table, misfit in zip(tables, why_not, strict=True) if misfit is None]
        if fitting:
            self.chosen = TablePartition(fitting[0])
            return
        for table, misfit in zip(tables, why_not, strict=True):
            # One that is for other heads, or for all, was perhaps meant for this run.
            if run.partition.table is not None or _but_for_attention(table, fingerprint, ranks.num_stages):
                say(f"partition=auto: {table.source} is for {misfit}; the split is balanced instead")
        with Bar("timing layers for partition=auto", shown=ranks.rank == 0 and sys.stderr.isatty()) as bar:

            def tell(sentence: str) -> None:
                bar.clear()
                say(sentence)

            self.chosen = AutoPartition.start(
                model,
                ranks,
                prefill=run.prefill,
                streams=streams,
                policy=json.dumps(run.policy, sort_keys=True, default=str),
                learn=run.partition.learn,
                alone=run.partition.alone and lends,
                tell=tell,
                on_progress=bar.step_of,
            )


def _streams(model: Model, ranks: Ranks, run: SplitsPrompts) -> Streams | None:
    """The KV heads that stream, as the policy says; None if none do. Every rank makes the same call."""
    if not run.prefill.streams:
        return None
    from launch.inputs.policies import rank_policies
    from partitioner.cost.streaming import Streams
    from runahead.features.refused import check
    from runahead.features.setup import Setup

    def found() -> Streams:
        policies = rank_policies(run.policy)
        check(Setup(prefill=run.prefill, policies=policies, model=model))
        return Streams.of(policies, model)

    return ranks.on_all_ranks("the heads that stream", found)


def _fingerprint(model: Model, ranks: Ranks, prefill: PrefillOptions, streams: Streams | None) -> Fingerprint:
    """The fingerprint that a table has to fit."""
    from partitioner.table.fingerprint import Fingerprint

    return Fingerprint.of_model(model, device=ranks.device, backend=ranks.backend, prefill=prefill, streams=streams)


def _misfit(table: LookupTable, fingerprint: Fingerprint, num_ranks: int) -> str | None:
    """Describe the model, device and ranks (stages) of a table that does not fit; None if it fits."""
    found = table.fingerprint.differences(fingerprint)
    if num_ranks not in table.ranks():
        noun = "ranks" if fingerprint.tensor == 1 else "stages"
        found.append(f"{', '.join(map(str, table.ranks()))} {noun}, not {num_ranks}")
    return "; ".join(found) or None


def _but_for_attention(table: LookupTable, fingerprint: Fingerprint, num_ranks: int) -> bool:
    """Whether a table would fit if as many heads streamed, or tokens were as sparse, as in its search."""
    alike = replace(table.fingerprint, attention=fingerprint.attention)
    return _misfit(replace(table, fingerprint=alike), fingerprint, num_ranks) is None


def _auto(options: PartitionOptions, ranks: Ranks) -> context.Partitioner:
    path = options.table
    if path is not None:
        return AutoChoice([ranks.on_rank_0("the lookup table", lambda: _loaded(path))])
    return AutoChoice(ranks.on_rank_0("the lookup tables", _users_tables) if ranks.num_stages > 1 else [])


def _users_tables() -> list[LookupTable]:
    """The tables in the user's cache folder that can be read."""
    tables = []
    for path in sorted((cache_folder() / "tables").glob("*.json")):
        try:
            tables.append(_loaded(path))
        except ValueError as error:
            say(f"warning: partition=auto: {error}")
    return tables


def _table(options: PartitionOptions, ranks: Ranks) -> context.Partitioner:
    path = options.table
    assert path is not None
    return TablePartition(ranks.on_rank_0("the lookup table", lambda: _loaded(path)))


def _loaded(path: str | Path) -> LookupTable:
    """A table that is read. Raises: ValueError."""
    from partitioner.table.lookup_table import LookupTable

    return LookupTable.load(path)


PARTITIONS: dict[PartitionName, Callable[[PartitionOptions, Ranks], context.Partitioner]] = {
    PartitionName.auto: _auto,
    PartitionName.even: lambda options, ranks: context.even,
    PartitionName.ratios: lambda options, ranks: context.from_ratios(
        options.ratios or [], ranks_per_stage=ranks.num_shares
    ),
    PartitionName.table: _table,
}


def partitioner(options: PartitionOptions, ranks: Ranks) -> context.Partitioner:
    """Function from (number of tokens, number of ranks) to a context partition. Every rank makes the same call.

    Rank 0 reads a lookup table and sends it to the others.

    Raises:
        ValueError: on rank 0, if the table is wrong.
        SharedError: on the other ranks.
    """
    return PARTITIONS[options.name](options, ranks)


def prepare_partition(
    partition: context.Partitioner, model: Model, ranks: Ranks, run: SplitsPrompts, *, lends: bool = True
) -> None:
    """Prepare a partition for the loaded model: check a table, or choose what partition=auto splits by.

    Every rank makes the same call. A single stage has nothing to split.

    Args:
        lends: the last stage may be lent the threads of the others, and compute a prompt alone.

    Raises:
        ValueError, SharedError: as `check_table`.
    """
    if isinstance(partition, AutoChoice) and ranks.num_stages > 1:
        partition.choose(model, ranks, run, lends=lends)
    check_table(partition, model, ranks, run)


def check_table(partition: context.Partitioner, model: Model, ranks: Ranks, run: SplitsPrompts) -> None:
    """Check that a lookup table is for this run's model and device. Every rank makes the same call.

    A single stage has nothing to split and is not checked.

    Raises:
        ValueError: on rank 0, if the table is for another one, unless partition.force is set.
        SharedError: on the other ranks.
    """
    if not isinstance(partition, TablePartition) or ranks.num_stages == 1:
        return
    fingerprint = _fingerprint(model, ranks, run.prefill, _streams(model, ranks, run))
    ranks.on_rank_0("the lookup table", lambda: partition.check_fits(fingerprint, force=run.partition.force))


def kvr_name(run: RunOptions, partition: context.Partitioner, boundaries: Sequence[int]) -> str | None:
    """The paper's name for the partition of a prompt: KVR-E, KVR-S or KVR-P; None if it has none."""
    if not run.prefill.takes_partition:
        return None
    if isinstance(partition, AutoChoice):
        partition = partition.chosen
    if isinstance(partition, TablePartition):
        return partition.table.kvr_name(boundaries[-1], len(boundaries) - 1)
    return "KVR-E" if run.partition.name is PartitionName.even else None
