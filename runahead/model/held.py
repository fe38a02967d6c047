"""Layers that hold a state of a text beside keys and values or in place of them, and how transformers' code reaches it.

Stores, policies and schedules number the layers that store keys and values among themselves, and so are those that hold
a state: a layer may be both, and some (experts alone) are neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from runahead.attention.base import ALL_ROWS, LayerAttention, Recording
from runahead.attention.states import StateLayer, States, StateShape
from runahead.features.layer_types import MARKING, WITH_STATES, WITHOUT_CACHE
from runahead.model.layer_kinds import KINDS

Place: TypeAlias = tuple[Literal["kv", "state"], int]
"""Keys and values or a state, and its number among those of its kind."""

A_STATE = StateLayer()
"""Stands for the state of any layer where only the kinds of layers matter."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Keys and values and states of the layers of a model in which some hold a state.

    Attributes:
        kinds: type of every layer, as its config names it.
        kv_of: layer -> number of its keys and values.
        state_of: layer -> number of its state.
        counts: how many convolution and recurrent states the layer of each state has.
        shapes: of each state; empty while they are not known.
        order: all of them, in the order in which a forward is done with them.
        reads_late: layers that are given several tokens take hold of a state at once, and read it only after they have
            updated some part of it.
    """

    kinds: Sequence[str]
    kv_of: Mapping[int, int]
    state_of: Mapping[int, int]
    counts: Sequence[int]
    shapes: Sequence[StateShape] = ()
    order: Sequence[Place] = ()
    reads_late: bool = False

    @classmethod
    def by_config(cls, config: Any) -> Held | None:
        """The layers as transformers' own cache would have them; None if no layer holds a state."""
        kinds = getattr(config, "layer_types", None) or []
        if getattr(config, MARKING[-1], None) is not None:  # beside attention, and outside of transformers' cache
            num = config.num_hidden_layers
            numbers = {layer: layer for layer in range(num)}
            return cls(kinds=["full_attention"] * num, kv_of=numbers, state_of=numbers, counts=[2] * num)
        if not any(kind in WITH_STATES for kind in kinds):
            return None
        layers = enumerate(DynamicCache(config=config).layers)
        counts = {
            layer: each.number_of_states
            for layer, each in layers
            if isinstance(each, LinearAttentionLayer) and kinds[layer] not in WITHOUT_CACHE  # as before 5.23
        }
        return cls(
            kinds=list(kinds),
            kv_of={layer: layer for layer in range(len(kinds))},
            state_of={layer: number for number, layer in enumerate(counts)},
            counts=list(counts.values()),
        )

    def as_called(self, layers: Sequence[int], recording: Recording) -> Held:
        """The same with what one forward has shown.

        Args:
            layers: those that called attention, in order.
            recording: the attention of that forward.

        Raises:
            ValueError: a state was not asked for. The message has no remedy.
        """
        assert recording.states is not None
        shapes = [layer.shape for layer in recording.states.layers]
        for layer, number in self.state_of.items():
            if not shapes[number].parts:
                raise ValueError(f"keeps the state of its {self.kinds[layer]} layers outside transformers' cache")
        last = {place: at for at, place in enumerate(recording.order)}
        return replace(
            self,
            kv_of={layer: number for number, layer in enumerate(layers)},
            shapes=shapes,
            order=sorted(last, key=last.__getitem__),
        )

    @property
    def need_no_attention(self) -> set[int]:
        """Layers that need not call attention."""
        return {layer for layer, kind in enumerate(self.kinds) if kind not in KINDS}

    @property
    def kinds_with_states(self) -> list[str]:
        """Types of the layers that hold a state."""
        return sorted({self.kinds[layer] for layer in self.state_of})

    def nothing(self) -> States:
        """The states of a text without tokens."""
        return States([StateLayer(number_of_states=count) for count in self.counts])


class AsksInModules(ValueError):
    """Several modules of a layer hold a part of its state. The message has no remedy."""


class StatesOfForward:
    """The layers of transformers' cache in one forward, as far as the model's code asks for their states.

    A state is loaded when the model first asks for it, or only when it first updates it where `Held.reads_late` says
    that its numbers are not read before: what a layer computes until then need not wait for them. It is saved once the
    model has updated all of it; where it does so in place, as it does for single tokens, when the forward goes on to
    what comes after it in `Held.order`.

    Args:
        attention: of the forward.
        start: index of its first token.
        num_new: number of its tokens.
        pads: left padding of each row.
        one_by_one: layers take a given state for a single token alone.
        first_block: number of tokens in the first block of rows; None: layers are computed at once.

    Attributes:
        are_given: there are states when the forward begins, or they arrive in it. Rows that share the keys and values
            of a prompt have its states, though nothing comes before what they store.
        ends: of the pieces in which layers with states are given the new tokens: one, if nothing asks for more. A block
            of rows ends a piece, too.
        goes_on: the layer that is given its tokens in pieces has more of them to come.
    """

    def __init__(
        self,
        attention: LayerAttention,
        held: Held,
        *,
        start: int,
        num_new: int = 0,
        pads: Sequence[int] = (),
        one_by_one: bool = False,
        first_block: int | None = None,
    ) -> None:
        self._attention, self.held, self._start, self._num_new, self._pads = attention, held, start, num_new, pads
        self._longest_pad, states = max(pads, default=0), attention.states
        layers = [] if states is None else states.layers
        self._begun: Sequence[int] = () if states is None else states.begun
        self.are_given = start > 0 or bool(self._begun) or any(True for layer in layers for _ in layer.tensors())
        self.ends, self.goes_on, self._is_in_pieces = self._ends(one_by_one), False, False
        self._reads_late, self._only_asks = held.reads_late and min(self.ends[0], first_block or num_new) > 1, False
        self._loaded: dict[int, StateLayer] = {}
        self._before: StateLayer | None = None
        self._pending: int | None = None
        self._missing: set[tuple[str, int]] = set()

    def _ends(self, one_by_one: bool) -> Sequence[int]:
        stops = {*self._attention.stops, *(self._pads[row] for row in self._begun)}
        inside = sorted(stop - self._start for stop in stops if self._start < stop < self._start + self._num_new)
        if one_by_one and (self.are_given or inside):
            inside = list(range(1 if self.are_given else inside[0], self._num_new))
        return [*inside, self._num_new]

    def __len__(self) -> int:
        return len(self.held.kinds)

    def __iter__(self) -> Iterator[StateLayer | None]:
        """The layers as kinds: transformers' masks ask for these, before any layer asks for its state."""
        return iter([A_STATE if layer in self.held.state_of else None for layer in range(len(self))])

    def __getitem__(self, layer: int) -> StateLayer | None:
        number = self.held.state_of.get(layer)
        if number is None:
            return None
        if number not in self._loaded:
            self.save_pending()
            if self._only_asks and self._reads_late:
                assert self._attention.states is not None
                return self._attention.states.layers[number]
            self._loaded[number] = loaded = self._attention.load_state(number)
            self._pending, is_padded = number, any(self._pads[row] > self._start for row in self._begun)
            self._before = loaded.made(Tensor.clone) if is_padded else None
            parts = self.held.shapes[number].parts if self.held.shapes else ()
            self._missing = {(part.name, part.index) for part in parts}
        return self._loaded[number]

    @contextmanager
    def only_asked(self) -> Iterator[None]:
        """Context manager in which the model's code takes hold of a state that it has not updated."""
        self._only_asks = True
        try:
            yield
        finally:
            self._only_asks = False

    def updated(self, layer: int, name: str, index: int) -> None:
        """Called once the model has updated a part of a state."""
        is_whole = len(self.ends) == 1 and self._attention.block is ALL_ROWS
        if not is_whole and not self._is_in_pieces:  # of what it has updated before nothing was kept
            kind = self.held.kinds[layer]
            raise AsksInModules(f"has {kind} layers of which several modules hold a state, which is not supported")
        if self.goes_on:
            return
        self._missing.discard((name, index))
        if not self._missing:
            self._save(self.held.state_of[layer])

    def are_at_once(self, width: int) -> bool:
        """Whether a module that is given so many tokens computes all of the forward in one piece."""
        return len(self.ends) == 1 and width == self._num_new

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """The pieces [first, end) of its tokens that a module is given, which asks for the state of one layer.

        Args:
            width: number of its tokens, from those of `LayerAttention.block` on.
        """
        self._is_in_pieces, begin = True, self._attention.block.first
        inside = [end - begin for end in self.ends if begin < end < begin + width]
        for first, end in pairwise((0, *inside, width)):
            self.goes_on = begin + end < self._num_new
            yield first, end
            if self.goes_on:
                assert self._pending is not None, "the module has asked for its state"
                self._reached(self._pending, self._start + begin + end)
        self._is_in_pieces = False

    def before_attention(self, layer: int) -> None:
        """Called before the attention of a layer."""
        if self._pending is not None and self.held.order:
            order, thing = self.held.order, ("kv", self.held.kv_of[layer])
            if order.index(("state", self._pending)) < order.index(thing):
                self.save_pending()

    def save_pending(self) -> None:
        """Save the state that was updated last, if it is not saved yet."""
        if self._pending is not None:
            self._save(self._pending)

    def _save(self, number: int) -> None:
        self._pending = None
        self._reached(number, self._start + self._num_new)
        self._before = None
        self._attention.save_state(number)

    def _reached(self, number: int, end: int) -> None:
        """Note that a layer has updated its state for the tokens before this index."""
        # transformers masks no forward of a single token, and padding must leave a row the state that it had.
        if self._longest_pad >= end:
            self._loaded[number].clear([row for row, pad in enumerate(self._pads) if pad >= end], self._before)
        if end in self._attention.stops:
            self._attention.keep_state(number, end)
