"""Seconds and bytes of collectives, in which all of several ranks take part over links that are alike."""

from __future__ import annotations

from math import ceil, log2

from partitioner.cost.link import Link


def allreduce_sent_bytes(num_bytes: float, num_ranks: int) -> float:
    """Bytes that one rank sends in a ring all-reduce of `num_bytes`, as in the halving algorithms."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


def allreduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds of an all-reduce of `num_bytes`, by the faster of two algorithms, as NCCL chooses.

    A ring takes 2 (p - 1) steps, each with 1/p of the bytes. A tree takes the latency of twice its depth, while its
    ranks send all bytes up and down (Thakur, Rabenseifner, Gropp 2005; NCCL's double binary trees).
    """
    if num_ranks == 1:
        return 0.0
    ring_s = 2 * (num_ranks - 1) * link.latency_s + allreduce_sent_bytes(num_bytes, num_ranks) / link.bandwidth_Bps
    tree_s = 2 * ceil(log2(num_ranks)) * link.latency_s + 2 * num_bytes / link.bandwidth_Bps
    return min(ring_s, tree_s)


def allgather_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds until all ranks have the `num_bytes` of each: in log2 p steps, each with twice the bytes of the last."""
    if num_ranks == 1:
        return 0.0
    return ceil(log2(num_ranks)) * link.latency_s + (num_ranks - 1) * num_bytes / link.bandwidth_Bps
