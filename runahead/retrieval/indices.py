"""Building and renewing the indices of a cache's layers: of what, for queries at which positions, and when."""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, w observed tokens, o remembered ones,
# H key dim, V value dim.

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from policies.retriever import DECODED_SOON, Index, PromptView, Retriever, StoredPart
from policies.row_values import row_values
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptLayer
from runahead.model.layers.query_prediction import FoldedProjection, QueryPrediction
from runahead.model.model import Model
from runahead.retrieval.clamped import ClampedDistances
from runahead.retrieval.layer import LayerRetrieval

REMEMBERED_EVERY = 4
"""One in this many of the queries that an index was built from is kept for rebuilding it."""


class Indices:
    """Indices of all layers of a batch.

    Args:
        pool: the layers, which others replace by layers with the same slots.
        num_ahead: tokens of the prompt after those that this rank keeps.
        prediction: predicts queries; None if none is predicted.
        clamped: where queries meet keys; None at their own positions.

    Attributes:
        layers: index and statistics of each layer; None before the prompt, and if the layer does not retrieve.
    """

    def __init__(
        self,
        policy: Retriever,
        model: Model,
        pool: Sequence[KeptLayer],
        num_ahead: int,
        prediction: QueryPrediction | None,
        clamped: ClampedDistances | None,
    ) -> None:
        self._policy, self._pool, self._num_ahead, self._device = policy, pool, num_ahead, model.device
        self._prediction, self._clamped, self._rotaries = prediction, clamped, model.known_rotaries
        self._pads: tuple[list[int], Tensor] | None = None
        self.layers: list[LayerRetrieval | None] = [None] * model.num_layers

    def __getitem__(self, layer: int) -> LayerRetrieval:
        """The index and statistics of a layer that has some."""
        found = self.layers[layer]
        assert found is not None, layer
        return found

    def fork(self, pool: Sequence[KeptLayer], clamped: ClampedDistances | None) -> Indices:
        """An independent copy over other layers with the same slots."""
        other = copy.copy(self)
        other._pool, other._clamped = pool, clamped
        other.layers = [None if layer is None else copy.copy(layer) for layer in self.layers]
        for number, layer in enumerate(other.layers):
            if layer is not None:
                layer.index = layer.index.fork(partial(stored_keys, pool, number))
                layer.hit_mass = list(layer.hit_mass)
        return other

    def observed(self, layer: int, q_BNCH: Tensor, positions_BC: Tensor) -> Tensor:
        """Queries of the last tokens, rotated to positions after the prompt; 0 on padding.

        A query's large dims depend on its position, and an index serves the positions of tokens to be decoded.
        """
        observed = min(max(self._policy.observed, 1), q_BNCH.shape[2])
        q_BNwH, positions_Bw = q_BNCH[:, :, -observed:], positions_BC[:, -observed:]
        q_BNwH = q_BNwH * (positions_Bw >= 0)[:, None, :, None]
        if self._rotaries is None:
            return q_BNwH
        if self._clamped is None:
            by_Bw = torch.full_like(positions_Bw, self._num_ahead + DECODED_SOON)
        else:
            by_Bw = self._clamped.to_window(layer, positions_Bw)
        return self._rotaries[layer].turned(q_BNwH, by_Bw)

    def extend(self, layer: int, q_BNwH: Tensor, num_new: int) -> bool:
        """Add given tokens to a layer's index. Returns False where it has to be built anew, for their queries."""
        found, observed = self.layers[layer], self._policy.observed
        is_short = num_new < observed or observed == 0
        if found is None or not (is_short or self._policy.extends):
            return False
        if not is_short:
            found.index.see(q_BNwH)
        found.append(self._pool[layer])
        found.age += num_new
        return True

    def build(
        self,
        layer: int,
        kv: tuple[Tensor, Tensor],
        q_BNwH: Tensor,
        next_B: Tensor,
        terms: AttentionTerms,
        *,
        room: int,
        was_cut: bool = False,
        stored_parts_B: Sequence[Sequence[StoredPart]] = (),
    ) -> None:
        """Build or renew a layer's index of these tokens, for queries like `q_BNwH`; see `PromptView`.

        Args:
            kv: keys (B, K, n, H) and values (B, K, n, V) of all slots.
            was_cut: tokens of an earlier index are not among these.
        """
        view = PromptView(
            layer=layer,
            num_layers=len(self.layers),
            q_BNwH=q_BNwH,
            k_BKnH=kv[0],
            v_BKnV=kv[1],
            scaling=terms.scaling,
            softcap=terms.softcap,
            pads=list(self._pool[layer].pads),
            positions_BKn=self._pool[layer].positions_BKn(),
            next_B=next_B,
            turn=None if self._rotaries is None else self._rotaries[layer].turned,
            room=room,
            stored=partial(stored_keys, self._pool, layer),
            stored_parts_B=stored_parts_B,
        )
        found = self.layers[layer]
        if found is not None and self._policy.renews_index and not was_cut:
            found.append(self._pool[layer])
            index = found.index
            index.renew(view)
        else:
            index = self._policy.index(view)
            if not hasattr(index, "how"):
                raise ValueError(f"{type(index).__name__}.__init__ must call super().__init__(view, how)")
        if found is None:
            found = self.layers[layer] = LayerRetrieval(index=index, terms=terms)
        found.index, found.folded, found.terms, found.age = index, self._folded(layer, index), terms, 0
        if self._policy.observed and self._rotaries is not None and not self._policy.extends:
            some_BNoH = q_BNwH[:, :, ::REMEMBERED_EVERY] if q_BNwH.shape[2] == self._policy.observed else q_BNwH
            found.observed_BNoH = some_BNoH.clone()

    def renew_if_old(self, layer: int, start: int, pads: Sequence[int]) -> None:
        """Rebuild or renew an old index for the positions that decoding has reached, as rotation changes the queries.

        Layers take turns, so that no step rebuilds all of them. The next token has index `start`.
        """
        found, kept = self[layer], self._pool[layer]
        if found.observed_BNoH is None or found.age < DECODED_SOON + layer:
            return
        assert self._rotaries is not None
        by_Bo = torch.full_like(found.observed_BNoH[:, 0, :, 0], found.age, dtype=torch.int64)
        q_BNoH = self._rotaries[layer].turned(found.observed_BNoH, by_Bo)
        k_BKnH, v_BKnV = kept.read()
        if kept.on_host and not self._policy.renews_index:
            k_BKnH = k_BKnH.contiguous()  # one copy over the link, since an index reads them more than once
        kv, next_B = (k_BKnH, v_BKnV), self.next_B(start, pads)
        self.build(layer, kv, q_BNoH, next_B, found.terms, room=DECODED_SOON + layer)

    def after(self, positions_BC: Tensor) -> Tensor:
        """Position in each row of the first token after the prompt, whose last tokens on this rank are at these."""
        return positions_BC[:, -1] + 1 + self._num_ahead

    def next_B(self, start: int, pads: Sequence[int]) -> Tensor:  # noqa: N802
        """Position in each row of the token with index `start`. The pads are copied to the device only once."""
        if self._pads is None or self._pads[0] != list(pads):
            self._pads = list(pads), row_values(pads, self._device)
        return start - self._pads[1]

    def _folded(self, layer: int, index: Index) -> FoldedProjection | None:
        """The query projection folded with an index's basis; None if the index has no smaller basis of one row.

        Rows of a batch have different bases, and folded weights for each would cost more than they save.
        """
        basis_BKHr = index.query_basis_BKHr
        if self._prediction is None or basis_BKHr is None or basis_BKHr.shape[0] > 1:
            return None
        full = basis_BKHr.shape[3] == basis_BKHr.shape[2]  # saves nothing
        return None if full else self._prediction.folded(layer, basis_BKHr[0])


def stored_keys(pool: Sequence[KeptLayer], layer: int) -> Tensor:
    """Keys (B, K, n, H) of all slots; on a GPU as a view of the pool in host memory.

    No method of `Indices`: an index that held these would be free, as its pool, when garbage is collected alone.
    """
    return pool[layer].read()[0]
