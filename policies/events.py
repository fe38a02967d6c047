"""Events (EM-LLM, Fountas et al., ICLR 2025, arXiv 2407.09450): blocks that end where the text surprises the model.

A block ends before a token whose surprise -log p exceeds the mean of the surprises in the `window` before it by more
than `gamma` of their standard deviations (Sec. 3.2). None has fewer than `least` tokens or more than `most`: an end
that comes too soon is left out, and a block that grows too long is cut.

With `refine=modularity` each such end first moves back to where it parts the tokens around it best (Algorithm 1). In a
graph whose edges are products k_i k_j of keys, summed over KV heads and the last layers, the modularity of the parts
[0, t) and [t, T) of a window is 1 / 4m sum_ij (A_ij - d_i d_j / 2m) [same part]. Sums of A over a part are squares of
sums of keys, so all t of a window take one pass over its keys. As in published code the window reaches half of a
block's length beyond both of its ends, and not beyond the text that is known. Products are of keys as they are stored;
where they sum to 0, the end stays. An end too soon after the one before, as that was refined, is left out.
"""

# Legend: S tokens of the padded text, n some of them, T tokens of a window, L layers, K kv heads, H key dim, X dims of
# the keys of several heads and layers side by side.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from policies.options import choice, require, require_default, require_least


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
        require_least(self, prefix="events.", window=2, least=1)
        require(self.most >= self.least, "events.most", self.most, f"must be at least policy.events.least={self.least}")
        require(math.isfinite(self.gamma), "events.gamma", self.gamma, "must be a finite number")
        require(0 < self.layers <= 1, "events.layers", self.layers, "must be above 0 and at most 1")
        rule = "without policy.events.refine=modularity"
        require_default(self, "layers", given=self.refine is Refine.none, rule=rule, prefix="events.")
        names, rule = vars(self), "on blocks of one size; use {usual}, or policy.events.by=surprise"
        require_default(self, *names, given=self.by is By.size, rule=rule, prefix="events.")

    def ends(
        self,
        surprise_S: Sequence[float],
        *,
        num_told: int,
        begin: int,
        before: int,
        k_LKSH: Sequence[Tensor],
    ) -> list[int]:
        """Ends of a row's next blocks: the slots after them.

        Args:
            surprise_S: -log p of each slot's token, NaN where it is not known.
            num_told: slots among which earlier ends were looked for.
            begin, before: where the text begins, and where the last block so far ends.
            k_LKSH: keys of the layers by which ends are refined; they are not without any.
        """
        seen_from, found = max(0, num_told - self.window), list[int]()
        is_mark_n = surprising(np.array(surprise_S[seen_from:]), gamma=self.gamma, window=self.window)
        for end in (np.flatnonzero(is_mark_n[num_told - seen_from :]) + num_told).tolist():
            if end - before < self.least:
                continue
            if k_LKSH:
                half = (end - before) // 2
                first, last = max(begin, before - half), min(len(surprise_S), end + half)
                k_TX = torch.cat([k_KSH[:, first:last].transpose(0, 1).flatten(1) for k_KSH in k_LKSH], dim=1)
                of_places = modularity(k_TX)[before + self.least - first : end + 1 - first]
                best = of_places.argmax().masked_fill(of_places[-1].isnan(), len(of_places) - 1)
                end = before + self.least + int(best)
            while end - before > self.most:
                before += self.most
                found.append(before)
            if end - before >= self.least:
                found.append(end)
                before = end
        return found


def surprising(surprise_S: np.ndarray, *, gamma: float, window: int) -> np.ndarray:
    """Mask of the tokens whose surprise exceeds what the tokens before them let expect. NaN is not known.

    At least two of the window have to be known.
    """
    is_known = ~np.isnan(surprise_S)
    x = np.where(is_known, surprise_S, 0.0)
    sums = np.pad(np.cumsum([is_known, x, x * x], axis=1), ((0, 0), (1, 0)))
    count, total, squares = sums[:, :-1] - sums[:, np.maximum(np.arange(len(x)) - window, 0)]
    mean = total / np.maximum(count, 1)
    deviation = np.sqrt(np.maximum(squares - total * mean, 0) / np.maximum(count - 1, 1))
    return np.asarray(is_known & (count >= 2) & (x > mean + gamma * deviation))


def modularity(k_TX: Tensor) -> Tensor:
    """Modularity (T + 1,), float64, of a window's tokens in the parts [0, t) and [t, T), for each t."""
    sums_TX = pad(k_TX.double().cumsum(dim=0), (0, 0, 1, 0))
    all_X = sums_TX[-1]
    twice_m = all_X @ all_X
    degrees_T = sums_TX @ all_X  # of the tokens before t
    within_T = sums_TX.square().sum(dim=1) + (all_X - sums_TX).square().sum(dim=1)
    return (within_T - (degrees_T**2 + (twice_m - degrees_T) ** 2) / twice_m) / (2 * twice_m)
