"""Events (EM-LLM, Fountas et al., ICLR 2025, arXiv 2407.09450): blocks that end where the text surprises the model.

A block ends before a token whose surprise -log p exceeds the mean of the surprises in the `window` before it by more
than `gamma` of their standard deviations (Sec. 3.2). None has fewer than `least` tokens or more than `most`: an end
that comes too soon is left out, and a block that grows too long is cut.

With `refine=modularity` each such end first moves back to where it parts the tokens around it best (Algorithm 1). In a
graph whose edges are products k_i k_j of keys, summed over KV heads and the last layers, the modularity of the parts
[0, t) and [t, T) of a window is 1 / 4m sum_ij (A_ij - d_i d_j / 2m) [same part]. Sums of A over a part are squares of
sums of keys, so all t of a window take one pass over its keys. As in published code the window reaches half of a
block's length beyond both of its ends, and not beyond the text that is known. Products are of keys as they are stored.
"""

# Legend: B batch, S tokens of the padded text, n slots, T tokens of a window, X dims of the keys of several heads and
# layers side by side.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.base import as_given, choice, require
from policies.block_index import BlockIndex
from policies.retriever import Index, Retriever


class By(Enum):
    """Rule by which blocks end: after as many tokens each, or where the text surprises the model."""

    size = "size"
    surprise = "surprise"


class Refine(Enum):
    """How the ends of events are refined; see the module."""

    none = "none"
    modularity = "modularity"


@dataclass(kw_only=True)
class Events:
    """Options of where blocks end.

    Attributes:
        by: size (all have the policy's number of tokens) or surprise.
        gamma: standard deviations above the mean from which on a token surprises.
        window: tokens before it of which these are.
        least, most: tokens of a block.
        refine: none or modularity.
        layers: share of the layers that retrieve, the last ones, whose keys are compared for that.

    Raises:
        ValueError: an option is out of range, or has no effect.
    """

    by: By = By.size
    gamma: float = 1.0
    window: int = 4096
    least: int = 8
    most: int = 128
    refine: Refine = Refine.none
    layers: float = 0.375

    def __post_init__(self) -> None:
        self.by = choice("events.by", By, self.by)
        self.refine = choice("events.refine", Refine, self.refine)
        require(self.window >= 2, "events.window", self.window, "must be at least 2")
        require(self.least >= 1, "events.least", self.least, "must be at least 1")
        require(self.most >= self.least, "events.most", self.most, f"must be at least policy.events.least={self.least}")
        require(math.isfinite(self.gamma), "events.gamma", self.gamma, "must be a finite number")
        require(0 < self.layers <= 1, "events.layers", self.layers, "must be above 0 and at most 1")
        refines = self.refine is not Refine.none or self.layers == Events.layers
        require(refines, "events.layers", self.layers, "has no effect without policy.events.refine=modularity")
        if self.by is By.size:
            for each in fields(self):
                name, value = each.name, getattr(self, each.name)
                rule = (
                    f"has no effect on blocks of one size; use {as_given(each.default)}, or policy.events.by=surprise"
                )
                require(value == each.default, f"events.{name}", value, rule)

    def with_options(self, value: Any) -> Events:
        """These options with those of a dictionary in their place. Raises: ValueError."""
        if isinstance(value, Events):
            return value
        known = [field.name for field in fields(self)]
        if not isinstance(value, dict) or not set(value) <= set(known):
            names = ", ".join(known)
            raise ValueError(f"policy.events={value} must have {names} only, as in policy.events.by=surprise")
        return replace(self, **value)


def surprising(surprise_n: np.ndarray, *, gamma: float, window: int) -> np.ndarray:
    """Whether each token's surprise exceeds what the tokens before it let expect. NaN is not known, and surprises not.

    At least two of the window have to be known.
    """
    is_known = ~np.isnan(surprise_n)
    middle = surprise_n[is_known].mean() if is_known.any() else 0.0  # so that sums of squares lose nothing
    x = np.where(is_known, surprise_n - middle, 0.0)
    sums = np.zeros((3, len(x) + 1))
    np.cumsum([is_known, x, x * x], axis=1, out=sums[:, 1:])
    places = np.arange(len(x))
    count, total, squares = sums[:, places] - sums[:, np.maximum(places - window, 0)]
    mean = total / np.maximum(count, 1)
    deviation = np.sqrt(np.maximum(squares - total * mean, 0) / np.maximum(count - 1, 1))
    return np.asarray(is_known & (count >= 2) & (x > mean + gamma * deviation))


def modularity(k_TX: Tensor) -> Tensor:
    """Modularity (T + 1,), float64, of a window's tokens in the parts [0, t) and [t, T), for each t."""
    sums_TX = torch.nn.functional.pad(k_TX.double().cumsum(dim=0), (0, 0, 1, 0))
    all_X = sums_TX[-1]
    twice_m = all_X @ all_X
    degrees_T = sums_TX @ all_X  # of the tokens before t
    within_T = sums_TX.square().sum(dim=1) + (all_X - sums_TX).square().sum(dim=1)
    return (within_T - (degrees_T**2 + (twice_m - degrees_T) ** 2) / twice_m) / (2 * twice_m)


def refined(ends: Sequence[int], start: int, known: range, keys: Callable[[int, int], Tensor], least: int) -> list[int]:
    """Ends of events, each moved back to the best place since the one before.

    Args:
        start: where the first event begins.
        known: slots of the text that is known.
        keys: (first slot, end) -> keys (T, X) of these slots.
        least: tokens that an event has at least.
    """
    found, before = list[int](), start
    for end in ends:
        half = (end - before) // 2
        first, last = max(known.start, before - half), min(known.stop, end + half)
        candidates = modularity(keys(first, last))[before + least - first : end + 1 - first].cpu()
        if len(candidates) and not candidates.isnan().any():
            end = before + least + int(candidates.argmax())
        found.append(end)
        before = end
    return found


def far_apart(ends: Sequence[int], start: int, least: int) -> list[int]:
    """The ends that are at least so many tokens after the one before."""
    found, before = list[int](), start
    for end in ends:
        if end - before >= least:
            found.append(end)
            before = end
    return found


def of_sizes(ends: Sequence[int], start: int, least: int, most: int) -> list[int]:
    """Ends of blocks of at least and at most so many tokens."""
    found, before = list[int](), start
    for end in ends:
        while end - before > most:
            before += most
            found.append(before)
        if end - before >= least:
            found.append(end)
            before = end
    return found


@dataclass(kw_only=True)
class EventRetriever(Retriever):
    """Base of policies that retrieve blocks, which may be events.

    Attributes:
        events: where blocks end: by=surprise, gamma, window, least, most, refine=modularity, layers.
    """

    events: Events = field(default_factory=Events)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.events = self._default_events().with_options(self.events)

    @staticmethod
    def _default_events() -> Events:
        """Those that are not given."""
        return Events()

    @property
    def needs_surprise(self) -> bool:
        return self.events.by is By.surprise

    @property
    def compares_layers(self) -> bool:
        return self.events.refine is not Refine.none

    def tell(self, indices: Mapping[int, Index], surprise_BS: Tensor) -> None:
        blocks = {layer: index for layer, index in indices.items() if isinstance(index, BlockIndex)}
        if not blocks:
            return
        one = next(iter(blocks.values()))
        last = list(blocks.values())[-max(1, round(self.events.layers * len(blocks))) :]
        keys_L = [index.stored() for index in last] if self.compares_layers else []
        for row, surprise_S in enumerate(surprise_BS.numpy()):
            start, begin = one.end_of(row)
            ends = self._ends(surprise_S, start, begin, one.num_told, [k_BKnH[row] for k_BKnH in keys_L])
            for index in blocks.values():
                index.add_ends(row, ends)
        for index in blocks.values():
            index.num_told = surprise_BS.shape[1]
            index.catch_up()

    def _ends(self, surprise_S: np.ndarray, start: int, begin: int, num_told: int, keys: Sequence[Tensor]) -> list[int]:
        """Ends of the next blocks of a row.

        Args:
            start: where the first of them begins.
            begin: where the text begins.
            num_told: slots whose surprises earlier blocks were made of; ends that these gave may have moved.
        """
        how = self.events
        seen_from = max(0, num_told - how.window)
        marks = surprising(surprise_S[seen_from:], gamma=how.gamma, window=how.window)
        ends = [end for end in (np.flatnonzero(marks) + seen_from).tolist() if end > start and end >= num_told]
        if keys:

            def side_by_side(first: int, end: int) -> Tensor:
                return torch.cat([k_KnH[:, first:end].transpose(0, 1).flatten(1) for k_KnH in keys], dim=1)

            known = range(begin, len(surprise_S))
            ends = refined(far_apart(ends, start, how.least), start, known, side_by_side, how.least)
        return of_sizes(ends, start, how.least, how.most)
