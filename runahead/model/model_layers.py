"""Layers of a model as forwards of one token show them: shapes, rules and order, and parts that policies ask for."""

# Legend: B batch, C new tokens, D model dim, N query heads, V value dim or vocabulary.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runahead.attention.base import LayerAttention, Recording
from runahead.attention.masks import MaskRule
from runahead.attention.states import StateShape
from runahead.cache.quantised.wire import sent_shape
from runahead.cache.slabs import KVShape
from runahead.features.layer_types import WITH_STATES
from runahead.model.held import Held, Place
from runahead.model.layer_kinds import decoder_config, unsupported_calls
from runahead.model.layers.attention_input import show_attention_inputs
from runahead.model.layers.narrowing import decoder_layers
from runahead.model.layers.output_projection import find_output_projections
from runahead.model.layers.query_prediction import QueryPrediction
from runahead.model.layers.shared_kv import end_with_last, find_sources
from runahead.model.loading.position_limit import max_positions
from runahead.model.loading.sharing import Shares
from runahead.model.marking.marks import Marks
from runahead.model.marking.taking import Trial, hook_layers
from runahead.model.rope_length import LengthRotary
from runahead.rotary import Rotary, find_rotaries

PROBED_POSITION = 1 << 17
"""Largest position at which a model's rotations are compared with ours before ours are used."""


class Boundary(Protocol):
    """The boundary at which the forwards of a model begin and end at other ranks, which have its other layers.

    Attributes:
        is_last: they end here, with the logits.
    """

    is_last: bool


class ModelLayers(ABC):
    """Layers of a loaded model, which `Model` runs.

    Args:
        module: the model, in eval mode, on its device.
        name: for reports and messages; the model type by default.
        shares: the ranks that hold the model together, if `module` is this rank's share.

    Attributes:
        config: configuration of the text decoder.
        kv_shapes: KV shape per layer that stores keys and values, of this rank's share. Their numbers in stores and
            attention come first, wherever they are among the model's layers (`kv_layers`).
        reads_kv_of: number of each other layer -> that of the one whose keys and values it reads.
        held: what the layers hold, if some hold a state; the others above are those with keys and values alone.
        num_query_heads: most query heads of a layer.
        rules: mask rule per layer that stores keys and values; None is plain causal attention.
        has_key_bias: attention adds a bias per key, as ALiBi does.
        last_layer: the last one that stores keys and values, where forwards of which only the last token's logits are
            wanted run the rest of it for that token alone; None: they compute all tokens.
        shares: as given.
    """

    marks: Marks | None
    last_layer: int | None = None
    _is_whole_only = False
    _rotaries: list[LengthRotary]
    _optional: set[str]

    def __init__(self, module: PreTrainedModel, *, name: str, shares: Shares | None) -> None:
        self.module, self.shares = module, shares
        self.config = decoder_config(module.config)
        self.name = name or str(self.config.model_type)
        self.device, self.dtype = module.device, module.dtype

    @abstractmethod
    def forward(self, ids_BC: Tensor, attention: LayerAttention, *, start: int, pads: list[int]) -> Tensor:
        """The forward of `Model`, with the arguments that one token needs to look at the layers."""

    @property
    def family(self) -> str:
        """The model in messages, with its type."""
        return f"model {self.name} ({self.config.model_type})"

    @property
    def num_shards(self) -> int:
        """Number of ranks that hold the model together."""
        return 1 if self.shares is None else self.shares.count

    def mean_over_shards(self, x: Tensor) -> Tensor:
        """Mean of a tensor over the ranks that share the model. All of them call this, inside a forward."""
        return x if self.shares is None else self.shares.mean(x)

    @cached_property
    def _layers(self) -> list[nn.Module]:
        num_layers = self.num_layers + len(self.reads_kv_of) if self.held is None else len(self.held.kinds)
        return decoder_layers(self.module, num_layers)

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """The decoder layers. Raises: ValueError: there is no list of them."""
        return self._layers

    @property
    def num_layers(self) -> int:
        """Number of layers that store keys and values."""
        return len(self.kv_shapes)

    @property
    def kv_layers(self) -> Sequence[int]:
        """Numbers in the model of the layers that store keys and values."""
        if self.held is not None:
            return list(self.held.kv_of)[: self.num_layers]
        return [self._order.index(number) for number in range(self.num_layers)]

    @property
    def has_reference(self) -> bool:
        """Whether transformers' own attention computes the same, so that logits are compared with it."""
        return self.marks is None and not self.runs_in_passes

    @property
    def runs_in_passes(self) -> bool:
        """Whether layers do not see the token itself, as those that read later ones in passes over a prompt (LCKV)."""
        return getattr(self.config, "runs_in_passes", False)

    def layer_sent_bytes(self, wire_bits: int | None) -> int:
        """Bytes of a token's keys and values in the first layer that stores any, as they are sent; 0 if none does.

        Args:
            wire_bits: as `prefill.wire_bits`.
        """
        return next((sent_shape(shape, wire_bits).bytes_per_token() for shape in self.kv_shapes), 0)

    @property
    def stores_after_reading(self) -> bool:
        """Whether layers that store keys and values come after others that read those of earlier ones (CLA)."""
        return self._order != sorted(self._order)

    @property
    def last_attention(self) -> tuple[int, Literal["attended"]]:
        """End of a forward without logits (`CausalAttention.ends`): the attention of the last layer of all."""
        return next(reversed(self._order), -1), "attended"

    @cached_property
    def has_layers(self) -> bool:
        """Whether the list of layers is found, so that deeper ones may compute fewer tokens."""
        with suppress(ValueError):
            return bool(self._layers)
        return False

    @property
    def state_shapes(self) -> Sequence[StateShape]:
        """Shapes of the states."""
        return () if self.held is None else self.held.shapes

    @property
    def order(self) -> Sequence[Place]:
        """Keys and values and states of all layers, in the order in which a forward is done with them."""
        return [("kv", layer) for layer in range(self.num_layers)] if self.held is None else self.held.order

    @property
    def named_order(self) -> Sequence[tuple[str, int]]:
        """Kind of each of `order`, "KV" or "state", and the number of its layer in the model."""
        if self.held is None:
            return [("KV", layer) for layer in self.kv_layers]
        numbers = {"kv": list(self.held.kv_of), "state": list(self.held.state_of)}
        return [("KV" if kind == "kv" else kind, numbers[kind][number]) for kind, number in self.order]

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int | None:
        return max_positions(self.config)

    def first_needed(self, layer: int, start: int, pads: list[int]) -> int:
        """First token that a chunk from `start` on attends to in a layer: 0, or later under a sliding window."""
        rule = self.rules[layer]
        return 0 if rule is None else min(pad + rule.first_key(max(0, start - pad)) for pad in pads)

    @cached_property
    def rotations(self) -> list[Rotary]:
        """Rotation of queries and keys per layer.

        Raises:
            ValueError: the model uses positions otherwise than by rotation, or by rotations that are not known. The
                message has no remedy.
        """
        why = None
        if self.has_key_bias:
            why = "adds a bias to its attention by distance (ALiBi)"
        elif self._rotaries:
            why = "rotates by angles that depend on the length of the text"
        elif "position_ids" not in self._optional:
            why = "counts positions by itself"
        else:
            try:
                last = min(self.max_positions or PROBED_POSITION, PROBED_POSITION) - 1
                return find_rotaries(self.module, lambda at: [heads[1:4] for heads in self._recorded(at).calls], last)
            except ValueError as error:
                why = str(error)
        raise ValueError(f"{self.family} {why}")

    @cached_property
    def rotaries(self) -> list[Rotary]:
        """`rotations`, for policies that give tokens other positions.

        Raises:
            ValueError: the rotations are not known, or cannot be replaced. The message has no remedy.
        """
        if self.reads_kv_of:
            raise ValueError(f"{self.family} has layers that read the keys of others")
        if any(rule is not None for rule in self.rules):
            raise ValueError(f"{self.family} has layers with sliding windows over the original positions")
        if self.has_key_bias:  # by the position at which a key is read: there is nothing to rotate
            return [Rotary(torch.empty(0, device=self.device))] * self.num_layers
        return self.rotations

    @cached_property
    def output_projections(self) -> list[Tensor]:
        """Weights (D, N * V) of the layers' output projections, for the heads of this rank's share.

        Raises:
            ValueError: they are not found. The message has no remedy.
        """
        if self.reads_kv_of:
            raise ValueError(
                f"{self.family} has layers that read the values of others, after output projections of their own"
            )
        try:
            return find_output_projections(
                self.module,
                self._run_one_token,
                self.num_layers,
                lambda x: self.mean_over_shards(x) * self.num_shards,
            )
        except ValueError as error:
            raise ValueError(f"{self.family} {error}") from error

    @cached_property
    def attention_input_dims(self) -> list[int]:
        """Width of the hidden states that each layer's attention is given.

        Once it was asked for, forwards show these states to their attention (`LayerAttention.see_attention_input`).

        Raises:
            ValueError: they are not found, or layers store no keys. The message has no remedy.
        """
        if self.reads_kv_of:
            raise ValueError(f"{self.family} has layers that read keys which others made of their own hidden states")
        try:
            return show_attention_inputs(self.module, self._run_one_token, self.num_layers, self.config.hidden_size)
        except ValueError as error:
            raise ValueError(f"{self.family} {error}") from error

    @cached_property
    def known_rotaries(self) -> list[Rotary] | None:
        """`rotaries`, or None where that raises a ValueError, and where positions are no rotations."""
        with suppress(ValueError):
            return None if self.has_key_bias else self.rotaries
        return None

    @cached_property
    def query_prediction(self) -> QueryPrediction:
        """Prediction of a layer's queries from the attention input of the layer before it.

        Raises:
            ValueError: this family does not allow it. The message has no remedy.
        """
        try:
            with torch.inference_mode():
                return QueryPrediction(self._layers, self._recorded, self.known_rotaries)
        except ValueError as error:
            raise ValueError(f"{self.family} {error}") from error

    def _recorded(self, position: int) -> Recording:
        """Record what the layers pass to their attention for one token at a position."""
        recording = Recording(start=position, pads=[0])
        self._run_one_token(recording)
        return recording

    def _run_one_token(self, attention: LayerAttention) -> None:
        """Run a token at the position at which `attention` starts, which records what it wants to know."""
        ids_11 = torch.full((1, 1), 3 % self.vocab_size, device=self.device)
        self.forward(ids_11, attention, start=attention.start, pads=[0])

    def _look_at_layers(self) -> None:
        """Find the KV shape and attention terms of every layer, and its state, by a forward of one token."""
        self.reads_kv_of: dict[int, int] = {}
        self.held = None
        if self.marks is not None:
            self._let_layers_mark(self.marks)
        self.held = held = Held.by_config(self.config)
        sources: dict[int, int] = getattr(self.config, "reads_kv_of", {})
        recording = self._recorded(0)
        self._order = [layer for layer, *_ in recording.calls]
        calls = sorted(recording.calls, key=lambda call: call[0]) if sources else recording.calls
        layers = [layer for layer, *_ in calls]
        num_layers = int(getattr(self.config, "num_hidden_layers", len(set(layers))))
        if why := unsupported_calls(layers, num_layers, held.need_no_attention if held else ()):
            raise ValueError(f"{self.family} {why}")
        if held is not None:
            try:
                self.held = held.as_called(layers, recording)
            except ValueError as error:
                raise ValueError(f"{self.family} {error}") from error
            calls = [(number, *call[1:]) for number, call in enumerate(calls)]
            self._order = list(range(len(calls)))
        if any(terms.rule is not None and terms.rule.sees_later_keys for *_, terms in calls):
            raise ValueError(f"{self.family} attends to later tokens, as an encoder does, which is not supported")
        sources = sources or find_sources(calls)
        if sources and held is not None:
            kinds = " and ".join(held.kinds_with_states)
            raise ValueError(
                f"{self.family} has layers that read keys and values of others, beside {kinds} layers that hold "
                "states, which is not supported"
            )
        storing = calls[: len(calls) - len(sources)]
        self.kv_shapes = [
            KVShape(
                num_kv_heads=k.shape[1],
                key_dim=k.shape[-1],
                value_dim=v.shape[-1],
                dtype=k.dtype,
                readers=tuple(reader for reader, source in sources.items() if source == layer),
            )
            for layer, _, k, v, _ in storing
        ]
        self.rules: list[MaskRule | None] = [terms.rule for *_, terms in storing]
        self.has_key_bias = any(terms.key_bias is not None for *_, terms in calls)
        self.num_query_heads = max((q.shape[1] for _, q, *_ in calls), default=0)
        self._needs_scores = any(terms.needs_scores for *_, terms in calls)
        self.reads_kv_of = sources
        self._end_with_last()

    def _let_layers_mark(self, marks: Marks) -> None:
        """Have layers give what marks are taken from. Raises: ValueError: some do not go with marks."""
        states = sorted({*WITH_STATES}.intersection(getattr(self.config, "layer_types", None) or ()))
        found = [f"it has {' and '.join(states)} layers"] if states else []
        if not states:
            hook_layers(self.module)
            self.marks = Trial(window=0, scale=0.0, offset=0.0, found=found)
            self._recorded(0)
        if found:
            raise ValueError(
                f"{self.family} cannot mark tokens (DMS, DMC): {found[0]}; use a Llama or Qwen 3 that was trained to "
                "mark tokens, or set dms_window_size and dmc_window_size to null with model.overrides"
            )
        self.marks = marks

    def _end_with_last(self) -> None:
        """Let what comes after the last stored keys and values or state compute the last token alone, if asked to."""
        self.last_layer = None
        # What is not compared with transformers stays whole, and what was found to be wrong.
        if not self.has_layers or not self.has_reference or self._is_whole_only:
            return
        kind, number = self.order[-1]
        layer = self.named_order[-1][1]
        if kind == "kv" and (self.held is None or layer not in self.held.state_of):
            self.last_layer = number
        end_with_last(self._layers[layer + 1 :], None if self.last_layer is None else self._layers[layer])
