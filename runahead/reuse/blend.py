"""Choice of the tokens of reused segments that are computed again (CacheBlend: Yao et al., EuroSys 2025).

Segments were encoded apart from each other, so their tokens lack what they would have seen in earlier segments. All of
them are computed in the first layers. From then on a layer computes those whose keys and values differ most, in the
layer before, from the stored ones; the stored ones serve for the others. A token that a layer does not compute is not
computed by later ones either, so the shares fall from layer to layer.
"""

# Legend: B batch, K kv heads, C tokens of a rank's chunk, c those that a layer computes, T tokens of a part, H key dim,
# V value dim, X = H + V.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.cache.new_tokens import NewTokens, num_tokens_of
from runahead.reuse.reused_kv import ReusedKV, ReusedPart

FIRST_LAYERS = 2
"""Layers that compute all tokens. Keys and values of the first are those of single tokens, which say nothing yet."""

SPREAD = 0.5
"""Difference between the mean share of later layers and that of the first and last of them, in mean shares."""

PADDING, DONE = -1.0, -2.0
"""Scores of padding, and of tokens that are not computed any more; deviations are at least 0."""


def shares_by_layer(share: float, num_layers: int) -> list[float]:
    """Share of the blended tokens that each layer computes: 1 in the first, then falling evenly around `share`."""
    spread, later = min(SPREAD * share, 1 - share), num_layers - FIRST_LAYERS
    falling = [share + spread * (1 - 2 * index / max(1, later - 1)) for index in range(later)]
    return [1.0] * min(FIRST_LAYERS, num_layers) + (falling if later > 1 else [share] * later)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Tokens of a part in a rank's chunk.

    Attributes:
        row: row of the batch.
        span: the tokens within the part.
        index_T: the same within the chunk.
    """

    part: ReusedPart
    row: int
    span: slice
    index_T: Tensor


class Blend:
    """Stored keys and values of a rank's new tokens, and the choice of those tokens that layers still compute.

    With several stages each chooses among the tokens of its own chunk, the same share of them.

    Args:
        reused: what the batch reuses.
        chunk: the rank's tokens in the padded batch.
        pads: left padding of each row.
        tokens: the new tokens of the forward, which are narrowed.
        mean_over_shares: mean of a tensor over the ranks that share the model.

    Attributes:
        computed: number of blended tokens that each layer computes, by layer and row.
    """

    def __init__(
        self,
        reused: ReusedKV,
        chunk: range,
        pads: Sequence[int],
        tokens: NewTokens,
        *,
        num_layers: int,
        device: torch.device,
        mean_over_shares: Callable[[Tensor], Tensor],
    ) -> None:
        self._tokens, self._mean_over_shares = tokens, mean_over_shares
        self._places = [
            place for part in reused.blended for row in part.rows for place in _places(part, row, reused, chunk, pads)
        ]
        num_blended = [0] * len(pads)
        wide = torch.promote_types(reused.blended[0].layers_TKX[0].dtype, torch.float32)
        self._score_BC = torch.full((len(pads), len(chunk)), math.inf, device=device, dtype=wide)
        for row, pad in enumerate(pads):
            self._score_BC[row, : max(0, pad - chunk.start)] = PADDING
        for place in self._places:
            num_blended[place.row] += len(place.index_T)
            self._score_BC[place.row, place.index_T] = 0.0
        self._num_others = [num_tokens_of(pad, chunk) - blended for pad, blended in zip(pads, num_blended, strict=True)]
        shares_BL = [shares_by_layer(share, num_layers) for share in reused.shares]
        self.computed = [
            [math.ceil(shares[layer] * count - 1e-9) for shares, count in zip(shares_BL, num_blended, strict=True)]
            for layer in range(num_layers)
        ]
        self._is_computed_Bc: Tensor | None = None

    @property
    def mean_computed(self) -> float:
        """Blended tokens of all rows that a layer computes, as a mean over the layers."""
        return sum(map(sum, self.computed)) / len(self.computed)

    def write(self, layer: int, chunk_CBKX: Tensor, k_BKcH: Tensor, v_BKcV: Tensor) -> None:
        """Store a layer's keys and values: those of the tokens that it computes, and stored ones of the others."""
        new_BcKX = torch.cat([k_BKcH, v_BKcV], dim=-1).transpose(1, 2)
        if self._tokens.left_Bc is None:
            chunk_CBKX.copy_(new_BcKX.transpose(0, 1))
            return
        assert self._is_computed_Bc is not None
        for place in self._places:
            chunk_CBKX[place.index_T, place.row] = _stored(place, layer, chunk_CBKX)
        at = torch.arange(len(new_BcKX), device=new_BcKX.device)[:, None], self._tokens.left_Bc
        chunk_BCKX = chunk_CBKX.transpose(0, 1)
        # A row that has fewer tokens to compute than others computes some in vain.
        chunk_BCKX[at] = torch.where(self._is_computed_Bc[..., None, None], new_BcKX, chunk_BCKX[at])

    def narrow(self, layer: int, chunk_CBKX: Tensor, key_dim: int) -> None:
        """Choose, after a layer, the tokens that the next one computes."""
        if layer + 1 == len(self.computed) or self.computed[layer + 1] == self.computed[layer]:
            return
        score_Bc = self._score_BC + self._deviations(layer, chunk_CBKX, key_dim)
        left_Bc = self._tokens.left_Bc
        if left_Bc is not None:
            assert self._is_computed_Bc is not None
            score_Bc = score_Bc.gather(1, left_Bc).masked_fill(~self._is_computed_Bc, DONE)
        wanted = [others + blended for others, blended in zip(self._num_others, self.computed[layer + 1], strict=True)]
        # A stable order, so that equal deviations give the same choice on all ranks that share the model.
        best_Bc = score_Bc.argsort(dim=1, descending=True, stable=True)[:, : max(wanted)]
        rank_c = torch.arange(max(wanted))
        is_wanted_Bc = (rank_c < torch.tensor(wanted)[:, None]).to(score_Bc.device)
        selected_Bc, order_Bc = best_Bc.sort(dim=1)
        self._tokens.narrow(selected_Bc)
        self._is_computed_Bc = is_wanted_Bc.gather(1, order_Bc)

    def _deviations(self, layer: int, chunk_CBKX: Tensor, key_dim: int) -> Tensor:
        """Squared distance (B, C) of keys and values to the stored ones, 0 for tokens that are not blended.

        Distances of keys and of values are in units of their means, so that neither outweighs the other.
        """
        apart_2BC = self._score_BC.new_zeros(2, *self._score_BC.shape)
        for place in self._places:
            here_TKX, stored_TKX = chunk_CBKX[place.index_T, place.row], _stored(place, layer, chunk_CBKX)
            squares_TKX = (here_TKX - stored_TKX).to(apart_2BC.dtype).square_()
            apart_2BC[0, place.row, place.index_T] = squares_TKX[..., :key_dim].sum(dim=(1, 2))
            apart_2BC[1, place.row, place.index_T] = squares_TKX[..., key_dim:].sum(dim=(1, 2))
        apart_2BC = self._mean_over_shares(apart_2BC)
        tiny = torch.finfo(apart_2BC.dtype).tiny
        return (apart_2BC / apart_2BC.sum(dim=-1, keepdim=True).clamp_min(tiny)).sum(dim=0)


def _places(part: ReusedPart, row: int, reused: ReusedKV, chunk: range, pads: Sequence[int]) -> list[_Place]:
    """Where a part's tokens are in a rank's chunk; none if they are all in others."""
    index_T = pads[row] + torch.searchsorted(reused.positions_BS[row, pads[row] :].contiguous(), part.positions_T)
    first, last = torch.searchsorted(index_T, torch.tensor([chunk.start, chunk.stop])).tolist()
    if first == last:
        return []
    index_T = (index_T[first:last] - chunk.start).to(part.layers_TKX[0].device)
    return [_Place(part=part, row=row, span=slice(first, last), index_T=index_T)]


def _stored(place: _Place, layer: int, like: Tensor) -> Tensor:
    """A layer's stored keys and values (T, K, X) of tokens."""
    return place.part.layers_TKX[layer][place.span].to(like.dtype)
