"""Context partition: which rank computes which contiguous tokens of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

Partitioner = Callable[[int, int], "ContextPartition"]
"""Function from number of tokens and number of ranks to a partition."""


@runtime_checkable
class LearningPartitioner(Protocol):
    """Partitioner that the engine tells, on every rank, how long the ranks computed and waited for each prompt."""

    def __call__(self, num_tokens: int, num_ranks: int) -> ContextPartition: ...

    def decide(self, num_tokens: int, num_ranks: int) -> ContextPartition:
        """The same on rank 0 alone, while the other ranks do something else."""

    def learn(self, partition: ContextPartition, compute_s: Sequence[float], wait_s: Sequence[float]) -> None:
        """Take in one prompt, with the seconds by rank; of a batch, its seconds divided by the number of rows."""


@runtime_checkable
class KnowsAlone(Protocol):
    """Partitioner that knows how long the last stage takes alone, with the threads that ranks of its host lend it."""

    def __call__(self, num_tokens: int, num_ranks: int) -> ContextPartition: ...

    def is_alone_sooner(self, partition: ContextPartition, num_stored: int) -> bool:
        """Whether the last stage computes a prompt alone sooner than all do, split like this. Every rank asks.

        Args:
            num_stored: tokens before those of the partition, whose keys and values the last stage has.
        """


@dataclass(frozen=True, kw_only=True)
class ContextPartition:
    """Boundaries of p contiguous chunks: rank i computes tokens [boundaries[i], boundaries[i + 1]).

    Chunks may be empty; a rank with an empty chunk takes no part in the prefill.

    Raises:
        ValueError: the boundaries do not start at 0 or decrease somewhere.
    """

    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.boundaries) < 2 or self.boundaries[0] != 0:
            raise ValueError(f"context partition {list(self.boundaries)} must start at 0 and have one chunk per rank")
        if any(end < start for start, end in pairwise(self.boundaries)):
            raise ValueError(f"context partition {list(self.boundaries)} must not decrease")

    @property
    def num_tokens(self) -> int:
        return self.boundaries[-1]

    @property
    def num_ranks(self) -> int:
        return len(self.boundaries) - 1

    def chunk(self, rank: int) -> range:
        """Token indices of a rank's chunk."""
        return range(self.boundaries[rank], self.boundaries[rank + 1])

    @property
    def chunk_lengths(self) -> list[int]:
        return [end - start for start, end in pairwise(self.boundaries)]

    @property
    def chain(self) -> list[int]:
        """Ranks with a chunk that is not empty, in order. The last one gets the whole prompt's KV cache and decodes."""
        return [rank for rank, length in enumerate(self.chunk_lengths) if length]

    def scaled(self, num_tokens: int, chain: Collection[int]) -> ContextPartition:
        """Split other tokens in about the same shares, of which each of these ranks has one token at least."""
        ends = [0]
        for rank, end in enumerate(self.boundaries[1:]):
            later = sum(other > rank for other in chain)
            most = min(num_tokens * end // self.num_tokens, num_tokens - later)
            ends.append(max(ends[-1] + (rank in chain), most))
        return ContextPartition(boundaries=tuple(ends)).check(num_tokens, self.num_ranks)

    def in_blocks(self, block: int) -> ContextPartition:
        """The partition whose inner boundaries are the nearest multiples of a block; the last chunk keeps a token."""
        num_tokens = self.num_tokens
        most = max(0, num_tokens - 1) // block * block
        ends = (end if end == num_tokens else min(round(end / block) * block, most) for end in self.boundaries)
        return ContextPartition(boundaries=tuple(ends))

    def check(self, num_tokens: int, num_ranks: int) -> ContextPartition:
        """Check that the partition is for this prompt and this many ranks (or stages of several ranks), and return it.

        Raises:
            ValueError: it has another number of chunks or tokens.
        """
        if self.num_ranks != num_ranks:
            raise ValueError(
                f"context partition has {self.num_ranks} chunks but the chain has {num_ranks} stages; give "
                "each stage (one rank, or ranks.tensor ranks) one chunk, which may be empty, or use partition=even"
            )
        if self.num_tokens != num_tokens:
            raise ValueError(f"context partition covers {self.num_tokens} tokens but the prompt has {num_tokens}")
        return self


def decide(chosen: Partitioner, num_tokens: int, num_ranks: int) -> ContextPartition:
    """The partition of a prompt, asked for on rank 0 alone."""
    if isinstance(chosen, LearningPartitioner):
        return chosen.decide(num_tokens, num_ranks)
    return chosen(num_tokens, num_ranks)


def even(num_tokens: int, num_ranks: int) -> ContextPartition:
    """Partition into chunks whose lengths differ by at most one token (KVR-E in the paper)."""
    return ContextPartition(boundaries=tuple(num_tokens * i // num_ranks for i in range(num_ranks + 1)))


def from_ratios(ratios: Sequence[float], *, ranks_per_stage: int = 1) -> Partitioner:
    """Partitioner with a fixed share of the prompt per rank, or per stage of several ranks, rounded to whole tokens.

    Args:
        ranks_per_stage: ranks that share a model, for messages.

    Raises:
        ValueError: a ratio is negative or not finite, they do not sum to 1 (within 1e-3), or their number
            is not the number of ranks or stages.
    """
    each = "rank" if ranks_per_stage == 1 else "stage"
    shares = [float(ratio) for ratio in ratios]
    if not shares or any(not 0.0 <= share <= 1.0 for share in shares) or abs(sum(shares) - 1.0) > 1e-3:
        raise ValueError(f"partition.ratios={shares} must be shares in [0, 1], one per {each}, that sum to 1")

    def partition(num_tokens: int, num_ranks: int) -> ContextPartition:
        if len(shares) != num_ranks:
            raise ValueError(
                f"partition.ratios has {len(shares)} shares for {places(num_ranks, ranks_per_stage)}; "
                f"use --nproc-per-node {len(shares) * ranks_per_stage} or partition=even"
            )
        ends = [round(num_tokens * sum(shares[: i + 1]) / sum(shares)) for i in range(num_ranks)]
        return ContextPartition(boundaries=(0, *ends))

    return partition


def places(number: int, ranks_per_stage: int) -> str:
    """So many places in a chain, in messages: "4 ranks", or "4 stages of 2 ranks"."""
    each = f"{number} {'rank' if ranks_per_stage == 1 else 'stage'}" + "s" * (number != 1)
    return each if ranks_per_stage == 1 else f"{each} of {ranks_per_stage} ranks"
