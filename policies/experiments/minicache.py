"""MiniCache (Liu et al., NeurIPS 2024, arXiv 2405.14366): neighbouring layers share the directions of keys and values.

From the middle of a model on, keys and values of a token point to similar directions in neighbouring layers. A pair of
layers stores one direction for both and the lengths of each. All tokens stay; those whose directions differ most are
stored as they are.

Exact are these tokens, chosen for keys and values apart, the prompt while it is computed, up to 32 newest tokens, and
all lengths, which are in 32 bits, since an error of one counts in every score. With retain_share=1 it is the full cache
bit by bit. Half of the layers take little more than half of their bytes, so a model about 77%; the paper adds few bits
on top. To attend to a merged layer, its keys and values are restored for that moment, so it saves memory and no time.
A pair lies on one rank; layers with windows are no part of one. Keys are merged as they are rotated; unrotated they
would come out the same, as both layers rotate a token alike.

Published code retains tokens by a threshold between the smallest and the largest angle (one re-implementation, xKV's,
those that are most alike) and frees nothing. Which of the two layers the published 60% are nearer to could not be
checked; here it is the upper one.

What was found: on SmolLM2 the directions that it merges have nothing in common, and answers are much worse
(docs/studies/results.md, docs/studies/quality.md). It is an experiment since it needs a store of its own,
merged_layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from policies.base import LayerForm, Policy
from policies.experiments.merged_layers import MergedLayers, paired_layers
from policies.options import require


@dataclass(kw_only=True)
class MiniCache(Policy, name="minicache"):
    """Merge the upper layers in pairs.

    Attributes:
        start_share: of the layers, that come before the first pair.
        interpolation: share of the angle between two vectors at which their direction lies, 0 for the lower layer's.
        retain_share: of the tokens of each KV head, those at the largest angles, that stay as they are; 1 is the
            full cache.
    """

    merges_layers: ClassVar[bool] = True
    while_decoding: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False

    start_share: float = 0.5
    interpolation: float = 0.6
    retain_share: float = 0.05

    def __post_init__(self) -> None:
        require(0 <= self.start_share < 1, "start_share", self.start_share, "must be at least 0 and less than 1")
        for option in ("interpolation", "retain_share"):
            value = getattr(self, option)
            require(0 <= value <= 1, option, value, "must be from 0 to 1")

    @property
    def last_queries(self) -> int:
        return 0

    def layer_form(self, shapes: Sequence[Any], sees_all: Sequence[bool], numbers: Sequence[int]) -> LayerForm | None:
        pairs = paired_layers(shapes, sees_all, self.start_share, numbers)
        options = {"towards_upper": self.interpolation, "exact_share": self.retain_share}
        return MergedLayers(pairs, options) if pairs else None
