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

from runahead.cache.attention import LayerCall, LayerHook
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


class Blend(LayerHook):
    """Stored keys and values of a rank's new tokens, and the choice of those tokens that layers still compute.

    A layer's memory has all tokens, also those that it does not compute, at their places. So a token attends to every
    token at a lower position, whichever of them are computed, and later ranks and decoding read it as any other.

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
        tokens.chunk_tokens = len(chunk)
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

    def before_save(self, call: LayerCall) -> None:
        """Put stored keys and values of the tokens that a layer does not compute among its new ones."""
        if self._tokens.left_Bc is None:
            return
        assert self._is_computed_Bc is not None
        new_BcKX = torch.cat([call.k_BKCH, call.v_BKCV], dim=-1).transpose(1, 2)
        batch, _, *shape = new_BcKX.shape
        chunk_BCKX = new_BcKX.new_zeros(batch, self._score_BC.shape[1], *shape)
        for place in self._places:
            chunk_BCKX[place.row, place.index_T] = _stored(place, call.layer, chunk_BCKX)
        at = torch.arange(batch, device=new_BcKX.device)[:, None], self._tokens.left_Bc
        # A row that has fewer tokens to compute than others computes some in vain.
        chunk_BCKX[at] = torch.where(self._is_computed_Bc[..., None, None], new_BcKX, chunk_BCKX[at])
        dims = [call.k_BKCH.shape[-1], call.v_BKCV.shape[-1]]
        call.k_BKCH, call.v_BKCV = chunk_BCKX.transpose(1, 2).split(dims, dim=-1)

    def attended(self, call: LayerCall) -> None:
        """Choose the tokens that the next layer computes."""
        layer = call.layer
        if layer + 1 == len(self.computed) or self.computed[layer + 1] == self.computed[layer]:
            return
        score_Bc = self._score_BC + self._deviations(call)
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

    def _deviations(self, call: LayerCall) -> Tensor:
        """Squared distance (B, C) of keys and values to the stored ones, 0 for tokens that are not blended.

        Distances of keys and of values are in units of their means, so that neither outweighs the other.
        """
        apart_2BC, key_dim = self._score_BC.new_zeros(2, *self._score_BC.shape), call.k_BKCH.shape[-1]
        for place in self._places:
            stored_TKX = _stored(place, call.layer, call.k_BKCH)
            stored = stored_TKX[..., :key_dim], stored_TKX[..., key_dim:]
            for number, (x_BKCX, theirs_TKX) in enumerate(zip((call.k_BKCH, call.v_BKCV), stored, strict=True)):
                here_TKX = x_BKCX[place.row, :, place.index_T].transpose(0, 1)
                squares_TKX = (here_TKX - theirs_TKX).to(apart_2BC.dtype).square_()
                apart_2BC[number, place.row, place.index_T] = squares_TKX.sum(dim=(1, 2))
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
