"""KV cache of a batch under cache policies: layers that are cut back, and the form in which they are stored then."""

# Legend: B batch, N query heads, C new tokens, H key dim.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from policies.base import LayerForm
from policies.layer_view import Phase
from policies.retriever import StoredPart
from policies.row_values import row_values
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVShape
from runahead.report import RankReport
from runahead.rotary import Rotary


class KeptCache(KVStore):
    """KV cache of a batch under cache policies, which may cut back each layer.

    Attributes:
        gaps: positions of each row at which the prompt has no token; empty if there are none in any row. In a cache
            with gaps no policy drops tokens.
        form: how layers are stored once given tokens have attended to them; None: as they are.
        stored_parts: by layer and row, the segments that the prompts reuse, with what a policy has stored of them;
            empty if there are none.
    """

    layers: list[KeptLayer]
    gaps: Sequence[int] = ()
    _before: list[list[KeptLayer]] | None = None
    stored_parts: Sequence[Sequence[Sequence[StoredPart]]] = ()

    def __init__(self, layers: Sequence[KeptLayer], form: LayerForm | None = None) -> None:
        self.layers, self.form = list(layers), form

    @classmethod
    def empty(
        cls,
        shapes: Sequence[KVShape],
        *,
        batch: int,
        device: torch.device,
        rotaries: Sequence[Rotary] | None = None,
    ) -> KeptCache:
        """A cache without tokens. `rotaries`, one per layer, re-encode positions."""
        layers = [KeptLayer.empty(shape, batch=batch, room=0, device=device) for shape in shapes]
        for layer, rotary in zip(layers, rotaries or [], strict=rotaries is not None):
            layer.rotary = rotary
        return KeptCache(layers)

    @property
    def device(self) -> torch.device:
        """The device that computes attention."""
        return self.layers[0].placed_TBK.device

    @property
    def rotates(self) -> bool:
        return any(layer.rotary is not None for layer in self.layers)

    @property
    def shares_memory(self) -> bool:
        """Whether other caches may have the same memory: none of it is written over in place, or left for another."""
        return True

    @property
    def indexes_all(self) -> bool:
        """Whether `index` is called after every chunk of a prompt, not only after the last one."""
        return False

    @property
    def slots_by_layer(self) -> list[int]:
        """Number of stored slots of each layer, on average over its KV heads."""
        return [layer.tokens_per_head for layer in self.layers]

    def open(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens) -> LayerStore:
        if self._before is not None:
            self._before[layer].append(self.layers[layer].remembered())
        # After a turn of one token the layer may still be exact.
        if self.form is not None and tokens.phase is Phase.decode:
            room = q_BNCH.shape[2]
            if self.form.complete(self.layers, layer, room=room):
                self.close(layer, room=room)
        return self.layers[layer]

    def readers(self, layer: int) -> Sequence[int]:
        return self.layers[layer].shape.readers

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor | None:  # noqa: N802
        if not any(self.gaps):
            return None
        pads = self.layers[0].pads
        offsets = [gap - pad for gap, pad in zip(self.gaps, pads, strict=True)]
        return index_C + row_values(offsets, index_C.device)[:, None]

    def put(self, layer: int, kept: KeptLayer) -> None:
        """Store a layer that policies cut back in place of the one it was made of."""
        self.layers[layer] = kept

    def free(self, *, room: int) -> None:
        """Free the memory of each layer but that of the stored tokens and of `room` more."""
        for layer in self.layers:
            layer.free(room=room)

    def own(self, layer: int, *, room: int, is_borrowed: bool) -> None:
        """Called after the attention of a prompt to a layer, and after the policies.

        Args:
            room: new tokens for which the layer has room.
            is_borrowed: whether the layer is in memory of others, from which it is moved.
        """
        is_stored = self.form is not None and self.form.store(self.layers, layer, room=room)
        if is_borrowed and not is_stored:
            self.layers[layer].copy_out(room=room)
        self.close(layer, room=room)

    def end_turn(self, *, room: int) -> None:
        """Called at the end of a prompt or turn that was computed in chunks; frees as `free`."""
        if self.form is None:
            self.free(room=room)
        else:
            self.form.settle(self.layers, room=room)

    def index(
        self,
        layer: int,
        seen: SeenKV,
        positions_BC: Tensor,
        terms: AttentionTerms,
        *,
        start: int,
        room: int,
        was_cut: bool,
    ) -> None:
        """Update indices into a layer; called after the policies cut it back, with given tokens in its last slots.

        Args:
            seen: what the queries of these tokens saw.
            positions_BC: positions of these tokens in their rows, below 0 on padding.
            start: index of the first of them in the padded batch.
            room: tokens that are expected to follow.
            was_cut: whether slots were dropped.
        """

    def observe(self, layer: int, q_BNCH: Tensor, positions_BC: Tensor, chunk: range) -> None:
        """See the queries of a piece of a prompt whose last one is to come; `index` is called after that alone.

        Args:
            positions_BC: as of `index`.
            chunk: indices of the piece's tokens in the padded batch.
        """

    def see_surprise(self, surprise_BC: Tensor, start: int) -> None:
        """See how tokens of given ones have surprised the model, before anything is retrieved.

        Args:
            surprise_BC: -log p of each, float64, on the host; NaN where it is not known.
            start: index of the first of them in the padded batch.
        """

    def fork(self) -> KeptCache:
        """The same tokens for a forked conversation. Both share memory until new tokens are appended."""
        other = self._forked()
        other.gaps = self.gaps
        other.states = None if self.states is None else self.states.fork()
        if other.form is not None:
            other.form.forked(other.layers)
        return other

    def _forked(self) -> KeptCache:
        """`fork` without the gaps."""
        return KeptCache([layer.fork(copy=False) for layer in self.layers], self.form)

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        """A row moves to memory of its own as it outgrows its room. A single row is this cache, with its padding."""
        if len(pads) == 1:
            return [self]
        return [self._row(row) for row in range(len(pads))]

    def _row(self, row: int) -> KeptCache:
        alone = KeptCache([layer.row(row) for layer in self.layers], self.form)
        alone.gaps = self.gaps[row : row + 1]
        alone.states = None if self.states is None else self.states.row(row)
        return alone

    def take_back(self, num_tokens: int) -> None:
        for layer in self.layers:
            layer.set_end(layer.end - num_tokens)

    @property
    def changes_as_it_grows(self) -> bool:
        return self.form is not None

    @contextmanager
    def remembering(self) -> Iterator[Callable[[int], None]]:
        """As of `KVStore`: every layer is remembered before each token."""
        before = self._before = [list[KeptLayer]() for _ in self.layers]

        def take_back(num_tokens: int) -> None:
            for number, layers in enumerate(before):
                self.layers[number] = layers[len(layers) - num_tokens]

        try:
            yield take_back
        finally:
            self._before = None

    def describe_prompt(self, report: RankReport) -> None:
        super().describe_prompt(report)
        report.kept_tokens = self.slots_by_layer
