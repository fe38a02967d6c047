"""Causal attention over a KV store, and the hooks that run beside it in each layer."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim, D model dim.

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from torch import Tensor

from policies.layer_view import Phase
from runahead.attention.base import ALL_ROWS, BlockEndsHere, ForwardEndsHere, LastTokenAlone, LayerAttention, LayerInput
from runahead.attention.op import Part, nothing
from runahead.attention.partial import AttentionTerms
from runahead.attention.states import StateLayer
from runahead.cache.base import KVStore, LayerStore, Reader, SeenKV
from runahead.cache.index import SlabIndex
from runahead.cache.new_tokens import NewTokens

End: TypeAlias = tuple[int, Literal["saved", "attended"]]
"""A layer, and what ends a forward there: its keys and values are stored, or its attention is computed."""


@dataclass(slots=True)
class LayerCall:
    """One call of a layer's attention, as hooks see it. Of a layer in blocks of rows it is the call for one of these.

    Attributes:
        layer: number of the layer.
        source: the layer whose keys and values are read; another one has no keys and values of its own.
        q_BNCH, k_BKCH, v_BKCV, terms: what the model's layer passes to attention. `before_save` may replace them.
        tokens: the new tokens, by their places in the layer's store. `before_save` may replace them.
        input_BCD: hidden states that the layer's attention is given, if the model shows them.
        stores: whether the keys and values are to be stored. `before_save` may say no, if they are there already.
        store: the layer's store, from `save` on.
        seen: what is stored, as the queries see it, from the attention to it on.
    """

    layer: int
    source: int
    q_BNCH: Tensor
    k_BKCH: Tensor
    v_BKCV: Tensor
    terms: AttentionTerms
    tokens: NewTokens
    input_BCD: Tensor | None = None
    stores: bool = True
    store: LayerStore = field(init=False)
    seen: SeenKV = field(init=False)


class LayerHook:
    """Something to do beside the attention of each layer. A method that is not overridden costs nothing.

    Of a layer in blocks of rows `before_save` and `wait_for_load` come with the first block, all else with the last.

    Attributes:
        takes_blocks: layers may be computed in blocks of rows, so that a call has the queries of one of these alone.
    """

    takes_blocks = False

    def before_save(self, call: LayerCall) -> None:
        """Called before a layer's new keys and values are stored: may wait for memory, or replace them."""

    def save(self, call: LayerCall) -> None:
        """Called once they are stored, and before their queries attend."""

    def wait_for_load(self, call: LayerCall) -> None:
        """Called after the queries have attended to what is here: returns once earlier ranks' tokens are there, too."""

    def load_state(self, number: int) -> None:
        """Called before a layer reads its state: returns once that of all tokens before is there."""

    def keep_state(self, number: int, stop: int) -> None:
        """Called once a layer has updated its state for the tokens before a stop, if the forward has any."""

    def save_state(self, number: int) -> None:
        """Called once a layer has updated its state, the n-th of all."""

    def closed(self, call: LayerCall) -> None:
        """Called once nothing reads a layer any more: after its attention, or that of the last layer that reads it.

        What its queries saw is still there.
        """

    def attended(self, call: LayerCall) -> None:
        """Called after each layer's attention, and also after that of a layer which reads another one."""


Verb: TypeAlias = Callable[..., None]
"""A method of a hook, of a `LayerCall`, the number of a state, or this and a stop."""


class CausalAttention(LayerAttention):
    """Causal attention of the tokens [start, start + C) of a left-padded batch to themselves and all tokens before.

    Args:
        cache: holds the earlier tokens and receives the new ones.
        start: index of the first new token in the padded batch.
        pads: left padding of every row.
        phase: `prefill` for given tokens, `decode` for generated ones.
        tokens: the new tokens, where hooks know them, too; by default they are made of the above.
        hooks: from the outermost to the innermost: `closed` and `attended` are called in reverse order.
        ends: where the forward ends, if not with the logits.
        attend: of a layer, by its number: what computes attention in place of `op.attend`, where it has keys and values
            of its own.
        on_layer: called after each layer that stores keys and values, and after each state.
        stops: as of `LayerAttention`.
    """

    _load_state: Sequence[Verb] = ()
    _keep_state: Sequence[Verb] = ()
    _save_state: Sequence[Verb] = ()

    def __init__(
        self,
        cache: KVStore,
        *,
        start: int,
        pads: list[int],
        phase: Phase = Phase.prefill,
        tokens: NewTokens | None = None,
        hooks: Sequence[LayerHook] = (),
        ends: End | None = None,
        attend: Callable[[int], Callable[..., Part]] | None = None,
        on_layer: Callable[[], None] = nothing,
        stops: Collection[int] = (),
    ) -> None:
        super().__init__(start=start, pads=pads)
        self.stops = stops
        self.cache, self.tokens = cache, tokens or NewTokens(start, pads, phase)
        self.states, self.rotates = cache.states, cache.rotates
        self.tokens.part = cache.part
        self._ends, self._attend, self._on_layer = ends, attend, on_layer
        self.takes_passes = not hooks and ends is None  # each pass would call them
        self._needs_all_rows = [type(each).__name__ for each in hooks if not each.takes_blocks]
        self._before_save, self._save = _verbs(hooks, "before_save"), _verbs(hooks, "save")
        self._loads = _verbs(hooks, "wait_for_load")
        if self.states is not None:
            self._load_state, self._save_state = _verbs(hooks, "load_state"), _verbs(hooks, "save_state")
            self._keep_state = _verbs(hooks, "keep_state")
        self._closed, self._attended = _verbs(hooks[::-1], "closed"), _verbs(hooks[::-1], "attended")
        self._unread: dict[int, LayerCall] = {}
        self._stored: LayerCall | None = None  # of the layer that runs again for the last token
        self._input_BCD: Tensor | None = None

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        return self.cache.positions_BC(index_C, self.start)

    def see_ids(self, ids_BC: Tensor) -> None:
        self.tokens.ids_BC = ids_BC

    def see_input(self, layer: int, given: LayerInput) -> None:
        if self.tokens.phase is Phase.decode:
            self.cache.look_ahead(layer + 1, given)

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:
        self._input_BCD = x_BCD

    def load_state(self, number: int) -> StateLayer:
        _call_all(self._load_state, number)
        layer = super().load_state(number)
        assert self.start == 0 or layer.num_bytes > 0, f"state {number} of {self.start} earlier tokens is lost"
        return layer

    def keep_state(self, number: int, stop: int) -> None:
        for verb in self._keep_state:
            verb(number, stop)

    def save_state(self, number: int) -> None:
        _call_all(self._save_state, number)
        self._on_layer()

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        """As of the base class. Where a layer runs again, hooks are called with all queries; these are the last."""
        call, self._stored = self._stored, None
        awaits = bool(self._loads)  # once, and a layer that runs again has not yet
        if call is None:
            call = self.stored(layer, q_BNCH, k_BKCH, v_BKCV, terms)
            if self.needs_last_alone and self.cache.gather is None and call.store.sees_last_alone:
                self._stored = call if self.block.is_last else None
                raise LastTokenAlone if self.block.is_last else BlockEndsHere
            seen, terms = call.seen, call.terms
            awaits = awaits and self.block.first == 0
        else:
            assert call.layer == layer, (call.layer, layer)
            seen = call.store.seen(q_BNCH, call.tokens.after(call.q_BNCH.shape[2] - q_BNCH.shape[2]))
            if self._attend is not None:
                seen.attend_to = self._attend(layer)
            call.seen.not_attended, self._input_BCD = call.terms, None
        await_prefix = partial(_call_all, self._loads, call) if awaits else nothing
        keeps_lse = self._waits_for_readers(layer)
        out_BNCV = seen.output(terms, await_prefix, gather=self.cache.gather, keeps_lse=keeps_lse)
        self.attended(call)
        return out_BNCV

    def stored(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> LayerCall:
        """Store the new tokens of a layer. Attention to what the call has `seen` follows, and `attended`."""
        block = self.block
        call = LayerCall(layer, layer, q_BNCH, k_BKCH, v_BKCV, terms, self._tokens_of_block(), self._taken_input())
        if block.first == 0 and block.stores:
            _call_all(self._before_save, call)
        call.store = self.cache.open(layer, call.q_BNCH, call.terms, call.tokens)
        if call.stores and block.stores:
            call.store.append(call.k_BKCH, call.v_BKCV, call.tokens)
        if block.is_last and block.stores:
            _call_all(self._save, call)
        self._end_at(layer, "saved")
        if not block.attends:
            raise BlockEndsHere
        call.seen = call.store.seen(call.q_BNCH, call.tokens if call.terms.sees_own else self._without_own())
        if self._attend is not None:
            call.seen.attend_to = self._attend(layer)
        return call

    def attend_shared(
        self,
        layer: int,
        source: int,
        q_BNCH: Tensor,
        k_BKCH: Tensor,
        v_BKCV: Tensor,
        terms: AttentionTerms,
        *,
        skipped: int = 0,
    ) -> Tensor:
        call = self.read(layer, source, q_BNCH, k_BKCH, v_BKCV, terms, skipped=skipped)
        out_BNCV = call.seen.output(terms, gather=self.cache.gather, keeps_lse=source in self._unread)
        self.attended(call)
        return out_BNCV

    def read(
        self,
        layer: int,
        source: int,
        q_BNCH: Tensor,
        k_BKCH: Tensor,
        v_BKCV: Tensor,
        terms: AttentionTerms,
        *,
        skipped: int,
    ) -> LayerCall:
        """Read the keys and values of another layer, as `stored` stores a layer's own; see `attend_shared`."""
        tokens = self.tokens.after(skipped) if skipped else self._tokens_of_block()
        call = LayerCall(layer, source, q_BNCH, k_BKCH, v_BKCV, terms, tokens, self._taken_input())
        call.store = self.cache.layers[source]
        call.seen = call.store.seen(q_BNCH, tokens if terms.sees_own else self._without_own())
        return call

    def _tokens_of_block(self) -> NewTokens:
        """The new tokens from those of the block on, the same for all layers."""
        first = self.block.first
        assert not self._needs_all_rows or self.block == ALL_ROWS, f"{self._needs_all_rows} look at all rows of a layer"
        return self.tokens.once(("from", first), partial(self.tokens.after, first)) if first else self.tokens

    def _without_own(self) -> NewTokens:
        """Tokens whose queries see what those of the new ones see without these: each the one before it."""
        index = self.cache.slab_index
        assert type(index) is SlabIndex, f"{type(index).__name__} does not tell tokens by their index alone"
        return self.tokens.once("without own", partial(self.tokens.after, -1))

    def _taken_input(self) -> Tensor | None:
        """The hidden states that were shown since the last call, if any were: no other layer has the same."""
        input_BCD, self._input_BCD = self._input_BCD, None
        return input_BCD

    def attended(self, call: LayerCall) -> None:
        """Called after the attention of a call: close layers that nobody reads any more, and end the forward."""
        layer, source = call.layer, call.source
        if not self.block.is_last:
            self._end_at(layer, "attended")
            return
        if layer != source and source in self._unread:
            self._unread[source].seen.readers.append(Reader(layer=layer, seen=call.seen, terms=call.terms))
            if layer == self.cache.readers(source)[-1]:
                _call_all(self._closed, self._unread.pop(source))
        elif layer == source and self._waits_for_readers(layer):
            self._unread[layer] = call
        elif layer == source:
            _call_all(self._closed, call)
        _call_all(self._attended, call)
        if layer == source:
            self._on_layer()
        self._end_at(layer, "attended")

    def _waits_for_readers(self, layer: int) -> bool:
        """Whether hooks are told that a layer is closed only after the attention of others."""
        return bool(self._closed and self.cache.readers(layer))

    def _end_at(self, layer: int, moment: str) -> None:
        if self._ends == (layer, moment):
            raise ForwardEndsHere if self.block.is_last else BlockEndsHere


def _verbs(hooks: Sequence[LayerHook], name: str) -> list[Verb]:
    """The methods of this name of all hooks that have one of their own."""
    own = [hook for hook in hooks if getattr(type(hook), name) is not getattr(LayerHook, name)]
    return [getattr(hook, name) for hook in own]


def _call_all(verbs: Sequence[Verb], given: LayerCall | int) -> None:
    for verb in verbs:
        verb(given)
