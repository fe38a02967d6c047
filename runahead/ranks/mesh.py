"""The mesh of a job's ranks: stages of a chain, each of as many ranks as share one model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Stages x shares. Rank = stage * `num_shares` + share, so the ranks of a stage are neighbours on a host.

    A stage is a place in the chain: it computes a chunk of the prompt, each of its ranks with its share of every
    layer's heads. Ranks with the same share form a chain of their own, which keys and values of these heads travel.

    Attributes:
        num_stages: places in the chain.
        num_shares: ranks of a stage.
    """

    num_stages: int = 1
    num_shares: int = 1

    @classmethod
    def with_shares(cls, num_ranks: int, num_shares: int) -> Mesh:
        """The mesh of `num_ranks` ranks with `num_shares` ranks per stage. Raises: ValueError: they do not divide."""
        if num_ranks % num_shares:
            fitting = [shares for shares in range(1, num_ranks + 1) if num_ranks % shares == 0]
            raise ValueError(
                f"ranks.tensor={num_shares} makes no whole stages of {num_ranks} ranks; use a multiple of {num_shares} "
                f"ranks, or {one_of(fitting)} for ranks.tensor"
            )
        return cls(num_ranks // num_shares, num_shares)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.num_stages * self.num_shares

    def stage(self, rank: int) -> int:
        """The stage that a rank belongs to."""
        return rank // self.num_shares

    def share(self, rank: int) -> int:
        """The share of a stage's model that a rank has."""
        return rank % self.num_shares

    def rank(self, stage: int, share: int) -> int:
        """The rank with a share of a stage."""
        return stage * self.num_shares + share

    def members(self, stage: int) -> list[int]:
        """The ranks of a stage."""
        return [self.rank(stage, share) for share in range(self.num_shares)]

    def chain(self, share: int) -> list[int]:
        """The ranks with a share, by stage."""
        return [self.rank(stage, share) for stage in range(self.num_stages)]

    def links(self, stages: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Directed links between ranks of the same share, for links between stages."""
        return [
            (self.rank(sender, share), self.rank(receiver, share))
            for sender, receiver in stages
            for share in range(self.num_shares)
        ]

    def name(self, rank: int) -> str:
        """A rank in messages: its number, and its stage and share if stages have several ranks."""
        if self.num_shares == 1:
            return f"rank {rank}"
        return f"rank {rank} (stage {self.stage(rank)}, share {self.share(rank)})"

    def names(self, ranks: Iterable[int]) -> str:
        """Ranks in messages, joined by "and"."""
        return " and ".join(map(self.name, ranks))


ALONE = Mesh()
"""The mesh of one rank, which names every rank by its number."""


def one_of(numbers: Iterable[int]) -> str:
    """Numbers as alternatives in a sentence: "1, 2 or 4"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
