"""Interface of a search strategy: where the search of a split starts, and how it descends from there."""

from __future__ import annotations

from abc import ABC, abstractmethod

from partitioner.searches.chains import Chain, search_chains
from partitioner.searches.evaluations import Cost, Evaluations, SearchResult, SearchTask
from runahead.context import ContextPartition


class Strategy(ABC):
    """A way to search the split of one prompt.

    Attributes:
        takes_seed: it starts from a given split; otherwise always from even chunks.
        most_ranks: ranks that it is limited to; None without a limit.
    """

    takes_seed: bool
    most_ranks: int | None

    def search(self, cost: Cost, task: SearchTask, seed: ContextPartition | None = None) -> SearchResult:
        """Search the split with the lowest cost.

        Args:
            seed: split to start from, such as equal work or an interpolation of known entries; even chunks by default,
                and for a strategy that takes none.

        Raises:
            ValueError: too many ranks for this strategy, or a seed for another length or number of ranks.
        """
        evaluations = Evaluations(cost, task)
        return search_chains(evaluations, self._start(evaluations, seed), self._descend)

    @abstractmethod
    def evaluations_left(self, task: SearchTask, stride: int | None = None, at_stride: int = 0) -> int:
        """Estimate how many evaluations a search still needs.

        Args:
            stride: the search's present stride; None before its start.
            at_stride: evaluations at that stride so far.
        """

    @abstractmethod
    def _start(self, evaluations: Evaluations, seed: ContextPartition | None) -> tuple[int, ...]:
        """Boundaries from which the chain of all ranks is searched."""

    @abstractmethod
    def _descend(self, chain: Chain, start: tuple[int, ...]) -> None:
        """Search the partitions of a chain. The result is in the chain's evaluations."""
