"""The ways to split a prompt over ranks that partition= can name."""

from __future__ import annotations

from collections.abc import Callable

from runahead import context
from runahead.config import PartitionName, PartitionOptions


def _table(options: PartitionOptions) -> context.Partitioner:
    raise ValueError(f"partition.table={options.table} cannot be used yet; use partition=ratios or partition=even")


PARTITIONS: dict[PartitionName, Callable[[PartitionOptions], context.Partitioner]] = {
    PartitionName.even: lambda options: context.even,
    PartitionName.ratios: lambda options: context.from_ratios(options.ratios or []),
    PartitionName.table: _table,
}


def partitioner(options: PartitionOptions) -> context.Partitioner:
    """What turns (number of tokens, number of ranks) into a context partition.

    Raises: ValueError.
    """
    return PARTITIONS[options.name](options)
