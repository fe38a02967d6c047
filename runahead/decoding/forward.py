"""Forward of one new token per row, over whatever KV cache a prompt has left."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

import torch
from torch import Tensor

from policies.base import Phase, Policy, PromptPart
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.fixed import FixedCache
from runahead.cache.kept import NEW_ROOM
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.shard import ShardCache
from runahead.failures import first_line
from runahead.model.model import Model, PrefillEndsHere
from runahead.ranks.accelerator import Accelerator, accelerator_for
from runahead.thinning.attention import KeptAttention
from runahead.thinning.steps import PolicySteps

Forward = Callable[[Tensor, int], Tensor]
"""Token ids (B, 1) and their index in the padded batch -> logits (B, V), or (B, 0) on a rank that is told tokens."""


def fastest_form(cache: KVStore, model: Model, *, pads: list[int], num_tokens: int) -> KVStore:
    """A prompt's cache in the form that single new tokens attend to fastest.

    Args:
        pads: left padding per row.
        num_tokens: number of tokens of the padded prompt.
    """
    if model.repeats_steps and FixedCache.takes(cache):
        assert isinstance(cache, (KVCache, ShardCache))
        return FixedCache(cache, pads=pads, num_tokens=num_tokens)
    return cache.for_decoding()


def forward_over(
    model: Model,
    cache: KVStore,
    policies: Sequence[Policy],
    *,
    pads: list[int],
    prompt_tokens: int,
    is_told: bool = False,
    part: PromptPart | None = None,
) -> Forward:
    """Choose the forward of single new tokens after a prompt.

    Args:
        policies: those that decide after each token, over a cache that can drop tokens.
        pads: left padding per row.
        prompt_tokens: number of tokens of the padded prompt.
        is_told: another rank chooses the tokens, so this one ends a forward with the last layer's attention.
        part: the tokens of the prompt that this rank keeps, if each rank keeps its own.
    """
    attention = ToldAttention if is_told else CausalAttention
    if cache.repeats_steps:
        return FixedForward(model, cache, pads=pads, prompt_tokens=prompt_tokens, attention=attention)
    if not policies:
        steps = count(1)

        def over_all(ids_B1: Tensor, start: int) -> Tensor:
            logits_BV = _logits(model, ids_B1, attention(cache, start=start, pads=pads, phase=Phase.decode))
            may_capture = part is None  # under policies no rank has a cache of fixed shape
            if may_capture and next(steps) == FixedForward.WARM_UP and accelerator_for(model.device) is not None:
                agreed(cache, model, is_fine=False)  # another rank may be about to capture a graph
            return logits_BV

        return over_all
    kept_attention = ToldKeptAttention if is_told else KeptAttention

    def over_what_is_kept(ids_B1: Tensor, start: int) -> Tensor:
        tokens = NewTokens(start, pads, Phase.decode)
        steps = PolicySteps(
            model,
            policies,
            tokens,
            prompt_tokens=prompt_tokens if part is None else len(part.chunk),
            room=NEW_ROOM,
            part=part,
        )
        return _logits(model, ids_B1, kept_attention(cache, steps))

    return over_what_is_kept


class ToldAttention(CausalAttention):
    """Attention of a new token on a rank that needs no logits: nothing is computed after the last layer's."""

    def after(self, layer: int, store: LayerStore, seen: SeenKV, terms: AttentionTerms) -> None:
        if layer == self.cache.num_layers - 1:
            raise PrefillEndsHere


class ToldKeptAttention(KeptAttention):
    """As `ToldAttention`, under policies that decide after each layer."""

    def after(self, layer: int, store: LayerStore, seen: SeenKV, terms: AttentionTerms) -> None:
        super().after(layer, store, seen, terms)
        if layer == self.cache.num_layers - 1:
            raise PrefillEndsHere


def _logits(model: Model, ids_B1: Tensor, attention: CausalAttention) -> Tensor:
    with suppress(PrefillEndsHere):
        return model.forward(ids_B1, attention, start=attention.start, pads=attention.pads)
    return torch.empty(len(ids_B1), 0, device=ids_B1.device)


def agreed(cache: KVStore, model: Model, *, is_fine: bool) -> Tensor:
    """Whether it is so on all ranks that store the text, as 0 or 1 on the device (1,)."""
    return cache.agreed(torch.tensor([int(is_fine)], device=model.device))


class FixedForward:
    """Forward over a cache of fixed shape: the same operations on the same tensors in every step.

    A GPU replays it as one graph after three steps: one launch in place of some 40 per layer.

    Where several ranks store the text, the graph holds their exchanges, and NCCL wants an operation to be captured on
    all ranks or on none (its user guide, "Using NCCL with CUDA Graphs"). So no step is computed twice, since the others
    would take its exchanges for the next ones; and a rank that cannot capture tells the others at the end of the step.
    They read that in the next one, when the host has waited for the device anyway.
    """

    WARM_UP = 2
    """Steps before a graph is captured. In these, libraries allocate what they keep."""

    def __init__(
        self,
        model: Model,
        cache: KVStore,
        *,
        pads: list[int],
        prompt_tokens: int,
        attention: type[CausalAttention] = CausalAttention,
    ) -> None:
        self._model, self._cache, self._pads, self._prompt_tokens = model, cache, pads, prompt_tokens
        self._attention = attention
        self._ids_B1 = torch.zeros(len(pads), 1, dtype=torch.long, device=model.device)
        self._gpu = accelerator_for(model.device)
        self._num_steps = 0
        self._replay: Callable[[], Tensor] | None = None
        self._agreed_1: Tensor | None = None  # whether all ranks can go on towards a graph

    def __call__(self, ids_B1: Tensor, start: int) -> Tensor:
        """Logits (B, V), which the next call may overwrite."""
        self._ids_B1.copy_(ids_B1)
        self._num_steps += 1
        if self._agreed_1 is not None:
            if not self._agreed_1.item():
                self._gpu = self._replay = None
            self._agreed_1 = None
        if self._replay is not None:
            return self._replay()
        if self._gpu is None or self._num_steps < self.WARM_UP:
            return self._step()
        if self._num_steps == self.WARM_UP:
            with self._gpu.noting_waits() as waits:  # a capture that fails half-way may leave traces in torch
                logits_BV = self._step()
            reason = waits[0] if waits else None
        else:
            reason = self._capture(self._gpu)
            logits_BV = self._step()  # a capture runs nothing
        if reason is not None:
            warnings.warn(f"decoding runs without a CUDA graph: {reason}", stacklevel=2)
        self._agreed_1 = agreed(self._cache, self._model, is_fine=reason is None)
        return logits_BV

    def _capture(self, gpu: Accelerator) -> str | None:
        """Capture a step, without running it; returns why that failed, if it did."""
        try:
            self._replay = gpu.capture(self._step)
        except RuntimeError as error:  # the family's code does what a graph cannot hold
            return first_line(error)
        return None

    def _step(self) -> Tensor:
        """One step over the buffers. Nothing in it may depend on the number of the step but what is on the device."""
        attention = self._attention(self._cache, start=self._prompt_tokens, pads=self._pads, phase=Phase.decode)
        logits_BV = _logits(self._model, self._ids_B1, attention)
        self._cache.advance()
        return logits_BV
