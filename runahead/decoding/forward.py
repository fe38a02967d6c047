"""Forward of one new token per row, over whatever KV cache a prompt has left."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from policies.base import Phase, Policy
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.fixed import FixedCache
from runahead.cache.kept import NEW_ROOM, KeptCache
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.shard import ShardCache
from runahead.failures import first_line
from runahead.model.model import Model, PrefillEndsHere
from runahead.ranks.accelerator import accelerator_for
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
) -> Forward:
    """Choose the forward of single new tokens after a prompt.

    Args:
        policies: those that decide after each token, over a cache that can drop tokens.
        pads: left padding per row.
        prompt_tokens: number of tokens of the padded prompt.
        is_told: another rank chooses the tokens, so this one ends a forward with the last layer's attention.
    """
    attention = ToldAttention if is_told else CausalAttention
    if cache.repeats_steps:
        return FixedForward(model, cache, pads=pads, prompt_tokens=prompt_tokens, attention=attention)
    if not policies:

        def over_all(ids_B1: Tensor, start: int) -> Tensor:
            return _logits(model, ids_B1, attention(cache, start=start, pads=pads, phase=Phase.decode))

        return over_all
    assert isinstance(cache, KeptCache), type(cache)

    def over_what_is_kept(ids_B1: Tensor, start: int) -> Tensor:
        tokens = NewTokens(start, pads, Phase.decode)
        steps = PolicySteps(
            policies,
            tokens,
            prompt_tokens=prompt_tokens,
            num_layers=model.num_layers,
            room=NEW_ROOM,
            mean_over_shares=model.mean_over_shards,
        )
        return model.forward(ids_B1, KeptAttention(cache, steps), start=start, pads=pads)

    return over_what_is_kept


class ToldAttention(CausalAttention):
    """Attention of a new token on a rank that needs no logits: nothing is computed after the last layer's."""

    def after(self, layer: int, store: LayerStore, seen: SeenKV, terms: AttentionTerms) -> None:
        if layer == self.cache.num_layers - 1:
            raise PrefillEndsHere


def _logits(model: Model, ids_B1: Tensor, attention: CausalAttention) -> Tensor:
    with suppress(PrefillEndsHere):
        return model.forward(ids_B1, attention, start=attention.start, pads=attention.pads)
    return torch.empty(len(ids_B1), 0, device=ids_B1.device)


class FixedForward:
    """Forward over a cache of fixed shape: the same operations on the same tensors in every step.

    A GPU replays it as one graph after two steps: one launch in place of some 40 per layer.
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

    def __call__(self, ids_B1: Tensor, start: int) -> Tensor:
        """Logits (B, V), which the next call may overwrite."""
        self._ids_B1.copy_(ids_B1)
        self._num_steps += 1
        if self._gpu is None or self._num_steps < self.WARM_UP:
            return self._step()
        if self._replay is None:
            try:
                if self._num_steps == self.WARM_UP:
                    with self._gpu.refusing_waits():  # a capture that fails half-way may leave traces in torch
                        return self._step()
                self._replay = self._gpu.capture(self._step)
            except RuntimeError as error:  # the family's code does what a graph cannot hold
                warnings.warn(f"decoding runs without a CUDA graph: {first_line(error)}", stacklevel=2)
                self._gpu = None
                return self._step()  # nothing was counted, so the step is computed anew
        return self._replay()

    def _step(self) -> Tensor:
        """One step over the buffers. Nothing in it may depend on the number of the step but what is on the device."""
        attention = self._attention(self._cache, start=self._prompt_tokens, pads=self._pads, phase=Phase.decode)
        logits_BV = _logits(self._model, self._ids_B1, attention)
        self._cache.advance()
        return logits_BV
