"""Causal attention over a KV store: append the new tokens' keys and values, then attend to all that are stored."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from policies.base import Phase
from runahead.attention.base import LayerAttention, LayerInput
from runahead.attention.op import nothing
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import KVStore, LayerStore, ReaderQueries, SeenKV
from runahead.cache.new_tokens import NewTokens


class CausalAttention(LayerAttention):
    """Causal attention of the tokens [start, start + C) of a left-padded batch to themselves and all tokens before.

    Args:
        cache: holds the earlier tokens and receives the new ones.
        start: index of the first new token in the padded batch.
        pads: left padding of every row.
        phase: `prefill` for given tokens, `decode` for generated ones.
        on_layer: called after each layer.
    """

    def __init__(
        self,
        cache: KVStore,
        *,
        start: int,
        pads: list[int],
        phase: Phase = Phase.prefill,
        on_layer: Callable[[], None] = nothing,
    ) -> None:
        super().__init__(start=start, pads=pads)
        self.cache, self.tokens = cache, NewTokens(start, pads, phase)
        self.tokens.part = cache.part
        self._on_layer = on_layer
        self._unread: dict[int, tuple[LayerStore, SeenKV, AttentionTerms]] = {}

    @property
    def rotates(self) -> bool:
        return self.cache.rotates

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        return self.cache.positions_BC(index_C, self.start)

    def see_ids(self, ids_BC: Tensor) -> None:
        self.tokens.ids_BC = ids_BC

    def see_input(self, layer: int, given: LayerInput) -> None:
        if self.tokens.phase is Phase.decode:
            self.cache.look_ahead(layer + 1, given)

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        store, seen = self.stored(layer, q_BNCH, k_BKCH, v_BKCV, terms)
        out_BNCV = seen.output(terms, gather=self.cache.gather)
        self.attended(layer, store, seen, terms)
        return out_BNCV

    def stored(
        self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms
    ) -> tuple[LayerStore, SeenKV]:
        """Store the new tokens of a layer, and return it with what their queries see of it."""
        store = self.cache.open(layer, q_BNCH, terms, self.tokens)
        store.append(k_BKCH, v_BKCV, self.tokens)
        return store, store.seen(q_BNCH, self.tokens)

    def attended(self, layer: int, store: LayerStore, seen: SeenKV, terms: AttentionTerms) -> None:
        """Call `after`, now or once the last layer that reads this one has done so; called after `stored`."""
        if self.cache.readers(layer):
            self._unread[layer] = store, seen, terms
        else:
            self.after(layer, store, seen, terms)
        self._on_layer()

    def attend_shared(
        self, layer: int, source: int, q_BNCH: Tensor, terms: AttentionTerms, *, skipped: int = 0
    ) -> Tensor:
        seen = self.read(source, q_BNCH, skipped=skipped)
        out_BNCV = seen.output(terms, gather=self.cache.gather)
        self.has_read(layer, source, seen, terms)
        return out_BNCV

    def read(self, source: int, q_BNCH: Tensor, *, skipped: int) -> SeenKV:
        """What the queries of a later layer see of a layer that has attended; arguments as of `attend_shared`."""
        tokens = self.tokens
        if skipped:
            tokens = NewTokens(tokens.start + skipped, tokens.row_pads, tokens.phase)
            tokens.part = self.cache.part
        return self.cache.layers[source].seen(q_BNCH, tokens)

    def has_read(self, layer: int, source: int, seen: SeenKV, terms: AttentionTerms) -> None:
        """Note that a layer has read another one; called after `read`."""
        if source in self._unread:
            _, stored, _ = self._unread[source]
            stored.readers.append(ReaderQueries(layer=layer, q_BNCH=seen.q_BNCH, terms=terms))
            if layer == self.cache.readers(source)[-1]:
                self.after(source, *self._unread.pop(source))

    def after(self, layer: int, store: LayerStore, seen: SeenKV, terms: AttentionTerms) -> None:
        """Hook that is called after a layer's attention, before anything that its queries saw is dropped.

        It is called after the attention of the layers that read this one, too, if the cache names them.
        """
