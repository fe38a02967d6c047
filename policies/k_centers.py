"""Keep tokens whose keys are centres of all keys, after SubGen (Zandieh et al., 2024, arXiv 2402.06082).

Keys come in clusters, and tokens of one cluster are attended to alike. Beside the recent window those tokens stay whose
keys are centres: one after another the key that is farthest from all that stay (Gonzalez, 1985), which at most doubles
the smallest possible distance of any key to its nearest centre. No attention is computed. SubGen also draws samples
from each cluster, to estimate what attention to all tokens would give; here attention is to the tokens that stay.

SubGen's code could not be read; its estimate would take a weight per token in attention. A cut takes as many steps as
centres are chosen, one after another.
"""

# Legend: B batch, K kv heads, n stored slots, c slots at a time, H key dim.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.layer_view import LayerView
from policies.precision import widened
from policies.scorer import RecentShare

BLOCK_DISTANCES = 1 << 20
"""Distances at a time, over all rows and heads, which bounds the memory that they take."""


@dataclass(kw_only=True)
class KCenters(RecentShare, name="k_centers"):
    """Score: the earlier a token becomes a centre, the higher. Recent and sink tokens are centres from the start."""

    evict_every: int = 128

    def score(self, view: LayerView) -> Tensor:
        k_BKnH = widened(view.k_BKnH)
        n, m = view.num_slots, self.slots(view)
        num_sinks = view.sinks(self.sinks)
        recent = min(self.recent_of(m), m - min(m, max(num_sinks)))
        nearest_BKn = k_BKnH.new_full(k_BKnH.shape[:3], math.inf)
        for row, heads, pad in view.heads_by_pad():
            nearest_Kn, k_KnH = nearest_BKn[row, heads], k_BKnH[row, heads]
            self._add(nearest_Kn, k_KnH, range(pad, min(pad + num_sinks[row], n)))
            self._add(nearest_Kn, k_KnH, range(max(pad, n - recent), n))
            nearest_Kn[:, :pad] = -math.inf
        scores_BKn = torch.zeros_like(nearest_BKn)
        for place in range(m - recent):
            # The first one of equals. What is a centre is not chosen again while there are others.
            farthest_BK1 = nearest_BKn.argmax(dim=-1, keepdim=True)
            scores_BKn.scatter_(-1, farthest_BK1, float(m - place))
            center_BK1H = k_BKnH.take_along_dim(farthest_BK1[..., None], dim=2)
            torch.minimum(nearest_BKn, distances(k_BKnH, center_BK1H)[..., 0], out=nearest_BKn)
            nearest_BKn.scatter_(-1, farthest_BK1, -1.0)
        return scores_BKn

    def _add(self, nearest_Kn: Tensor, k_KnH: Tensor, centers: range) -> None:
        """Make tokens of some heads centres, in place."""
        step = max(1, BLOCK_DISTANCES // nearest_Kn.numel())
        for first in range(centers.start, centers.stop, step):
            found_Kn = distances(k_KnH, k_KnH[:, first : min(first + step, centers.stop)]).amin(dim=-1)
            torch.minimum(nearest_Kn, found_Kn, out=nearest_Kn)
        nearest_Kn[:, centers.start : centers.stop] = -1.0


def distances(k_XnH: Tensor, center_XcH: Tensor) -> Tensor:
    """Distances (X, n, c) of keys to centres, exactly 0 between equal ones, as by matrix products it need not be."""
    return torch.cdist(k_XnH, center_XcH, compute_mode="donot_use_mm_for_euclid_dist")
