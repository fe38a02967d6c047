"""Search of the layers that are worth being exact, by the losses of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import NamedTuple, Self, TypeAlias

Exact: TypeAlias = frozenset[int]
"""Layers that attend to all keys, by their numbers in the model."""

NOISE = 2.0
"""Standard errors that a group of layers has to be worth."""


class Loss(NamedTuple):
    """Loss of a prompt in nats per token, and share of blocks that it computes, mean over layers."""

    nll: float
    density: float


Known: TypeAlias = dict[tuple[Exact, int], Loss]
"""Losses by set of exact layers and number of a prompt."""

Measure: TypeAlias = Callable[[int, Sequence[Exact], Sequence[Exact]], Iterator[Loss]]
"""Number of a prompt, sets of exact layers, and sets that may be asked for later -> loss of each of the former."""


@dataclass(frozen=True)
class Estimate:
    """A mean over samples, with its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """The estimate from at least two samples."""
        return cls(mean(samples), stdev(samples) / math.sqrt(len(samples)))

    @property
    def is_noise(self) -> bool:
        """Whether it is not above 0 for certain."""
        return self.mean <= NOISE * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.error:.3f}"


class Losses:
    """Losses of some prompts by sets of exact layers, each measured once.

    Args:
        prompts: their numbers.
        layers: those that may be exact; all of them are so in the exact prefill.
        measure: measures some sets of a prompt.
        known: what was measured before, by set and prompt, to which this adds.
    """

    def __init__(self, prompts: Sequence[int], layers: Iterable[int], measure: Measure, known: Known) -> None:
        self._prompts, self._all, self._measure, self._known = prompts, frozenset(layers), measure, known

    def learn(self, sets: Iterable[Exact], *, ahead: Sequence[Exact] = ()) -> None:
        """Measure these sets and the exact prefill, prompt by prompt.

        Args:
            ahead: sets that may be asked for next.
        """
        for prompt in self._prompts:
            lacking = [each for each in dict.fromkeys((self._all, *sets)) if (each, prompt) not in self._known]
            for exact, loss in zip(lacking, self._measure(prompt, lacking, ahead), strict=True):
                self._known[exact, prompt] = loss

    def _of(self, exact: Exact) -> list[Loss]:
        self.learn([exact])
        return [self._known[exact, prompt] for prompt in self._prompts]

    def more(self, exact: Exact, than: Exact | None = None) -> Estimate:
        """How much more some layers lose than others, by default than the exact prefill, of the same prompts."""
        pairs = zip(self._of(exact), self._of(self._all if than is None else than), strict=True)
        return Estimate.of([one.nll - other.nll for one, other in pairs])

    def density(self, exact: Exact) -> float:
        """Blocks that are computed, mean over prompts and layers."""
        return mean(loss.density for loss in self._of(exact))

    def told(self, exact: Exact) -> str:
        """A line about a set."""
        return f"{named(exact)}: {self.more(exact)} nats, density {self.density(exact):.0%}"


def search(
    losses: Losses, layers: Sequence[int], given: Iterable[int], *, group: int, most_loss: float
) -> Iterator[tuple[str, Exact]]:
    """Find the layers, and tell a line as soon as it is known, with the layers that are exact so far.

    Args:
        layers: that may be exact, ascending.
        given: that are so from the beginning, and stay so.
        group: number of layers that are tried together.
        most_loss: nats that may be lost.
    """
    given = exact = frozenset(given)
    others = [layer for layer in layers if layer not in given]
    groups = [others[first : first + group] for first in range(0, len(others), group)]
    losses.learn([exact], ahead=[exact.union(each) for each in groups])
    yield losses.told(exact), exact
    while groups and losses.more(exact).mean > most_loss:
        losses.learn([exact.union(each) for each in groups])
        worth = dict[int, float]()
        for number, each in enumerate(groups):
            less = losses.more(exact, exact.union(each))
            density = losses.density(exact.union(each))
            yield f"  layers {ranges(each):>9} exact: {less} nats less, density {density:.0%}", exact
            if not less.is_noise:  # a larger mean that may be noise is not preferred to one that is not
                worth[number] = less.mean
        if not worth:
            yield f"no other layers are worth more than {NOISE:g} standard errors", exact
            break
        exact = exact.union(groups.pop(max(worth, key=worth.__getitem__)))
        yield losses.told(exact), exact
    allowed, worth_of = max(most_loss, losses.more(exact).mean), dict[int, float]()
    found = sorted(exact - given)
    if len(found) > 1:
        losses.learn([exact - {layer} for layer in found])
        for layer in found:
            more = losses.more(exact - {layer}, exact)
            worth_of[layer] = more.mean
            yield f"  without layer {layer:>3}: {more} nats more", exact
    for layer in sorted(worth_of, key=worth_of.__getitem__):
        if losses.more(exact - {layer}).mean <= allowed:
            exact -= {layer}
            yield losses.told(exact), exact


def named(exact: Exact) -> str:
    return f"layers {ranges(sorted(exact))} exact" if exact else "all layers sparse"


def ranges(layers: Sequence[int]) -> str:
    """Ascending numbers in a few characters: 5-9, 12."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
