"""Forward of new tokens one at a time, over whatever KV cache a prompt has left."""

# Legend: B batch, N query heads, K kv heads, C given tokens, H head dim, D model dim, V vocabulary or value dim.

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from policies.base import Policy
from policies.layer_view import Phase, PromptPart
from policies.row_values import row_values
from runahead.attention.base import ForwardEndsHere, LayerAttention
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention, End
from runahead.cache.base import KVStore
from runahead.cache.fixed import in_fixed_shape
from runahead.cache.kept import NEW_ROOM
from runahead.cache.new_tokens import NewTokens
from runahead.decoding.recorded import RecordedStep, records, take_step
from runahead.failures import first_line
from runahead.model.model import Model
from runahead.ranks.accelerator import Accelerator, accelerator_for
from runahead.thinning.policy_hook import attention_under
from runahead.thinning.steps import PolicySteps

Forward = Callable[[Tensor, int], Tensor]
"""Token ids (B, 1) and their index in the padded batch -> logits (B, V), or (B, 0) on a rank that is told tokens."""


def fastest_form(cache: KVStore, model: Model, *, pads: list[int], num_tokens: int, apart: bool = False) -> KVStore:
    """A prompt's cache in the form that single new tokens attend to fastest: one for steps that are replayed, if any.

    Args:
        pads: left padding per row.
        num_tokens: number of tokens of the padded prompt.
        apart: rows may advance by different numbers of tokens.
    """
    fixed = None
    if (model.repeats_steps and accelerator_for(model.device) is not None) or _is_recorded(cache, model):
        fixed = in_fixed_shape(cache, pads=pads, num_tokens=num_tokens, apart=apart)
    return cache.for_decoding() if fixed is None else fixed


def _is_recorded(cache: KVStore, model: Model) -> bool:
    """Whether a CPU replays steps over a cache: not those that exchange parts with other ranks."""
    return cache.slab_index is not None and not cache.slab_index.is_part and records(model)


def forward_over(
    model: Model,
    cache: KVStore,
    policies: Sequence[Policy],
    *,
    pads: list[int],
    prompt_tokens: int,
    is_told: bool = False,
    part: PromptPart | None = None,
    length: int = 0,
) -> Forward:
    """Choose the forward of single new tokens after a prompt.

    Args:
        policies: those that decide after each token, over a cache that can drop tokens.
        pads: left padding per row.
        prompt_tokens: number of tokens of the padded prompt.
        is_told: another rank chooses the tokens, so this one ends a forward with the last layer's attention.
        part: the tokens of the prompt that this rank keeps, if each rank keeps its own.
        length: tokens that the padded text will have at least, for RoPE that depends on it.
    """
    ends = model.last_attention if is_told else None
    as_step = partial(model.ranges.around, "decoding step")
    if cache.repeats_steps:
        return as_step(FixedForward(model, cache, num_rows=len(pads), ends=ends))
    if not policies:
        steps = count(1)

        def over_all(ids_B1: Tensor, start: int) -> Tensor:
            attention = CausalAttention(cache, start=start, pads=pads, phase=Phase.decode, ends=ends)
            logits_BV = logits_of(model, ids_B1, attention, length=length)
            may_capture = part is None  # under policies no rank has a cache of fixed shape
            if may_capture and next(steps) == FixedForward.WARM_UP and accelerator_for(model.device) is not None:
                agreed(cache, model, is_fine=False)  # another rank may be about to capture a graph
            return logits_BV

        return as_step(over_all)

    def over_what_is_kept(ids_B1: Tensor, start: int) -> Tensor:
        attention = token_attention(
            model, cache, policies, start=start, pads=pads, prompt_tokens=prompt_tokens, ends=ends, part=part
        )
        return logits_of(model, ids_B1, attention, length=length)

    return as_step(over_what_is_kept)


def token_attention(
    model: Model,
    cache: KVStore,
    policies: Sequence[Policy],
    *,
    start: int,
    pads: list[int],
    prompt_tokens: int,
    ends: End | None = None,
    part: PromptPart | None = None,
) -> CausalAttention:
    """Attention of one generated token per row, after which policies decide; `start` is its index, else as above."""
    if not policies:
        return CausalAttention(cache, start=start, pads=pads, phase=Phase.decode, ends=ends)
    steps = PolicySteps(
        model,
        policies,
        NewTokens(start, pads, Phase.decode),
        prompt_tokens=prompt_tokens if part is None else len(part.chunk),
        room=NEW_ROOM,
        part=part,
        await_device=cache.await_device,
    )
    return attention_under(steps, cache, ends=ends)


def forward_one_by_one(
    model: Model,
    cache: KVStore,
    policies: Sequence[Policy],
    ids_BC: Tensor,
    *,
    start: int,
    pads: list[int],
    prompt_tokens: int | None = None,
    length: int = 0,
) -> Tensor:
    """Logits (B, C, V) after each of these tokens, as if they were generated one by one from index `start` on.

    In each layer a token is stored, attends and lets policies decide before the next one is stored, so the result is
    that of `forward_over`; all else is computed for all tokens at once, which reads the weights once.

    Args:
        model: each of its layers stores keys and values.
        cache: of a text of `start` tokens; nothing in it looks ahead to the next layer, as what retrieves does.
        policies, pads, prompt_tokens, length: as for `forward_over`; by default the prompt is all of that text.
    """
    assert not model.reads_kv_of, "a layer that reads others would see later tokens, which these store first"
    prompt_tokens = start if prompt_tokens is None else prompt_tokens
    tokens = [
        token_attention(model, cache, policies, start=index, pads=pads, prompt_tokens=prompt_tokens)
        for index in range(start, start + ids_BC.shape[1])
    ]
    return logits_of(model, ids_BC, OneByOneAttention(tokens), all_logits=True, length=length)


class OneByOneAttention(LayerAttention):
    """Attention of several tokens, each by an attention of its own: in every layer one after the other.

    A layer with a state computes them at once, since nothing decides what it holds.
    """

    def __init__(self, tokens: Sequence[CausalAttention]) -> None:
        super().__init__(start=tokens[0].start, pads=tokens[0].pads)
        self._tokens, self.rotates, self.states = tokens, tokens[0].rotates, tokens[0].states

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        return self._tokens[0].positions_BC(index_C)

    def see_ids(self, ids_BC: Tensor) -> None:
        for token, ids_B1 in zip(self._tokens, ids_BC.split(1, dim=1), strict=True):
            token.see_ids(ids_B1)

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:
        for token, x_B1D in zip(self._tokens, x_BCD.split(1, dim=1), strict=True):
            token.see_attention_input(layer, x_B1D)

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        each = self._each(q_BNCH, k_BKCH, v_BKCV)
        return torch.cat([token.attend(layer, *qkv, terms) for token, *qkv in each], dim=2)

    def _each(self, *of_all: Tensor) -> Iterator[tuple[Any, ...]]:
        """The attention of each token, with its query, key and value."""
        return zip(self._tokens, *(x.split(1, dim=2) for x in of_all), strict=True)


def logits_of(
    model: Model, ids_BC: Tensor, attention: LayerAttention, *, all_logits: bool = False, length: int = 0
) -> Tensor:
    """Logits (B, V), or (B, C, V); (B, 0) or (B, C, 0) where attention ends the forward, since no logits are needed."""
    start, pads = attention.start, attention.pads
    length = max(length, start + ids_BC.shape[1])
    with suppress(ForwardEndsHere):
        return model.forward(ids_BC, attention, start=start, pads=pads, length=length, all_logits=all_logits)
    return torch.empty(*ids_BC.shape[: 1 + all_logits], 0, device=ids_BC.device)


def agreed(cache: KVStore, model: Model, *, is_fine: bool) -> Tensor:
    """Whether it is so on all ranks that store the text, as 0 or 1 on the device (1,)."""
    return cache.agreed(row_values([int(is_fine)], model.device))


def _weakly(method: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A method of what calls it, which would else be a cycle: its memory stays until the garbage collector comes."""
    of_object = weakref.WeakMethod(method)

    def call() -> Tensor:
        known = of_object()
        assert known is not None, "its object calls it"
        return known()

    return call


class FixedForward:
    """Forward over a cache of fixed shape: the same operations on the same tensors in every step.

    A GPU replays it as one graph after three steps: one launch in place of some 40 per layer. A CPU with kernels of our
    own replays a recorded step after four (`RecordedStep`).

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
        num_rows: int,
        ends: End | None = None,
    ) -> None:
        self._model, self._cache, self._ends = model, cache, ends
        self._ids_B1 = torch.zeros(num_rows, 1, dtype=torch.long, device=model.device)
        self._gpu = accelerator_for(model.device)
        self._recorded: RecordedStep | None = None
        if _is_recorded(cache, model):
            index, slabs = cache.slab_index, cache.slabs
            assert index is not None and slabs is not None, "a step is recorded over slabs"
            numbers, by_layer = [self._ids_B1, *index.numbers], [slab.slab_TBKX for slab in slabs.by_layer]
            self._recorded, leave = take_step(model, _weakly(self._step), numbers, by_layer, type(index).__name__)
            weakref.finalize(self, leave).atexit = False
        self._num_steps = 0
        self._replay: Callable[[], Tensor] | None = None
        self._agreed_1: Tensor | None = None  # whether all ranks can go on towards a graph

    def __call__(self, ids_B1: Tensor, start: int) -> Tensor:
        """Logits (B, V), which the next call may overwrite."""
        self._ids_B1.copy_(ids_B1)
        if self._recorded is not None:
            return self._recorded()
        self._num_steps += 1
        if self._agreed_1 is not None:
            if not self._agreed_1.item():
                self._gpu = self._replay = None
            self._agreed_1 = None
        if self._replay is not None:
            return self._replay()
        if self._gpu is None or self._num_steps < self.WARM_UP:
            return self._step()
        failure = self._gpu.graphs.failure
        if self._num_steps == self.WARM_UP:
            with self._gpu.noting_waits() as waits:  # a capture that fails half-way may leave traces in torch
                logits_BV = self._step()
            reason = waits[0] if waits else failure
        else:
            reason = self._capture(self._gpu)
            logits_BV = self._step()  # a capture runs nothing
        if reason is not None and failure is None:  # else it was told with an earlier prompt
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
        """One step over the buffers. Nothing in it may depend on the step or the prompt but what is on the device.

        So tokens are counted as if one came before, without padding: where they lie, and their positions, the cache
        has on the device.
        """
        pads = [0] * len(self._ids_B1)
        attention = CausalAttention(self._cache, start=1, pads=pads, phase=Phase.decode, ends=self._ends)
        logits_BV = logits_of(self._model, self._ids_B1, attention)
        self._cache.advance()
        return logits_BV
