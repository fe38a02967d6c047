"""Fused attention on a GPU gives the logits of its plain fallback, and the tests here run every fused kernel."""

# Legend: B batch, S tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from runahead import Conversation, Engine, GenerationOptions, Model, PrefillOptions
from runahead.attention import partial as attention
from runahead.cache.attention import CausalAttention
from runahead.cache.fixed import in_fixed_shape
from runahead.cache.index import ShardIndex
from runahead.cache.kv_cache import KVCache
from runahead.cache.shard import Shard
from runahead.config import Attention, PrefillName
from runahead.decoding.forward import FixedForward, forward_over
from runahead.kv_transfer.gathering import LoneGathering
from runahead.thinning.rank_policies import RankPolicies
from tests.families import FAMILIES, MARKING, SHARING, VOCAB_SIZE, build
from tests.gpu.fused_kernels import KernelCall, NotingCalls, calls_in_source
from tests.gpu.models import CUDA, alone, model
from tests.policies.running import Duo

LENGTHS, CHUNK, NEW = (200, 131), 128, 6
"""Tokens of the prompts, how many of them are computed at a time, and tokens that follow: most by a replayed graph."""

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Tolerance of logits, most of which are in [-1, 1]: some units in the last place."""

TURING, AMPERE = (7, 5), (8, 0)
"""Compute capabilities of GPUs that lack FlashAttention, and of the first ones that have it."""

KERNEL = attention._kernel


def require_flash_attention() -> None:
    if torch.cuda.get_device_capability() < AMPERE:
        pytest.skip("this GPU has no FlashAttention")


def ids_of(lengths: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Random ids (B, S) of a left-padded batch with `NEW` that follow, and the padding of each row."""
    ids_BS = torch.randint(VOCAB_SIZE, (len(lengths), max(lengths) + NEW), generator=torch.Generator().manual_seed(4))
    return ids_BS.to(CUDA), [max(lengths) - length for length in lengths]


def by_steps(loaded: Model, lengths: tuple[int, ...], *, fixed: bool = False, shard: bool = False) -> Tensor:
    """Logits (1 + NEW, B, V) behind a prompt, computed in chunks, and behind each token that follows it.

    Args:
        fixed: decode over tensors of fixed shape, where kernels are fused.
        shard: decode as a stage that has a shard of the text, which is all of it.
    """
    ids_BS, pads = ids_of(lengths)
    end = max(lengths)
    own = loaded.empty_cache(end + NEW + 1, batch=len(lengths))
    for start in range(0, end, CHUNK):
        ids_BC = ids_BS[:, start : min(start + CHUNK, end)]
        logits = [loaded.forward(ids_BC, CausalAttention(own, start=start, pads=pads), start=start, pads=pads)]
    whole = Shard(chunk=range(end), num_tokens=end, is_own=(True,) * NEW)
    stored = KVCache(own.slabs, ShardIndex(whole, CUDA)) if shard else own
    in_steps = in_fixed_shape(stored, pads=pads, num_tokens=end) if fixed else None
    is_fixed = in_steps is not None
    is_even = all(shape.key_dim == shape.value_dim for shape in loaded.kv_shapes)
    assert is_fixed == (fixed and is_even and attention._kernel is KERNEL)
    cache = stored if in_steps is None else in_steps
    if shard:
        cache = cache.over_ranks(LoneGathering(alone(), [0]))
    forward = forward_over(loaded, cache, [], pads=pads, prompt_tokens=end)
    assert isinstance(forward, FixedForward) == is_fixed
    logits += [forward(ids_BS[:, step : step + 1], step).clone() for step in range(end, end + NEW)]
    reads = loaded.module.config.model_type in READS
    assert not isinstance(forward, FixedForward) or (forward._replay is None) == reads, "steps are replayed, or not"
    return torch.stack(logits)


def by_heads_of_different_lengths(loaded: Model, lengths: tuple[int, ...]) -> Tensor:
    """`by_steps` where a policy keeps few tokens of some heads."""
    ids_BS, pads = ids_of(lengths)
    conversation = Conversation(loaded, RankPolicies.everywhere([Duo(sinks=4, recent=30)]))
    first_BV = conversation.feed(ids_BS[:, :-NEW], pads=pads)
    return torch.cat([first_BV[None], conversation.follow(ids_BS[:, -NEW:]).transpose(0, 1)])


def densely(loaded: Model, lengths: tuple[int, ...]) -> Tensor:
    """Logits (1, B, V) behind a prompt of which all scores are computed."""
    ids_BS, pads = ids_of(lengths)
    prompts = [ids[pad:-NEW] for pad, ids in zip(pads, ids_BS.tolist(), strict=True)]
    engine = Engine(loaded, alone(), prefill=PrefillOptions(name=PrefillName.tsp, attention=Attention.dense))
    found, forward = list[Tensor](), loaded.forward

    def noted(*args: Any, **options: Any) -> Tensor:
        found.append(forward(*args, **options))
        return found[-1]

    with patch.object(loaded, "forward", noted):
        engine.generate(prompts, GenerationOptions(max_new_tokens=1))
    return found[0][None]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way from a prompt to logits, of a model without a window or with one. On `capability` None it is the GPU's."""

    dtype: torch.dtype
    run: Callable[[Model, tuple[int, ...]], Tensor]
    lengths: tuple[int, ...] = LENGTHS
    window: int | None = None
    capability: tuple[int, int] | None = None


WAYS = {
    "slabs": Way(dtype=torch.bfloat16, run=by_steps, lengths=LENGTHS[:1]),
    "slabs, padded rows": Way(dtype=torch.bfloat16, run=by_steps),
    "fixed shapes": Way(dtype=torch.bfloat16, run=partial(by_steps, fixed=True), lengths=LENGTHS[:1]),
    "fixed shapes, rows": Way(dtype=torch.bfloat16, run=partial(by_steps, fixed=True), lengths=LENGTHS[:1] * 2),
    "fixed shapes, padded rows": Way(dtype=torch.bfloat16, run=partial(by_steps, fixed=True)),
    "fixed shapes, float16": Way(dtype=torch.float16, run=partial(by_steps, fixed=True)),
    "a window": Way(dtype=torch.bfloat16, run=by_steps, lengths=LENGTHS[:1], window=50),
    "a shard": Way(dtype=torch.bfloat16, run=partial(by_steps, shard=True)),
    "a shard of fixed shape": Way(dtype=torch.bfloat16, run=partial(by_steps, shard=True, fixed=True)),
    "heads of different lengths": Way(dtype=torch.bfloat16, run=by_heads_of_different_lengths),
    "dense": Way(dtype=torch.bfloat16, run=densely),
    "dense, float32": Way(dtype=torch.float32, run=densely),
    "float32": Way(dtype=torch.float32, run=by_steps),
    "float16 before Ampere": Way(dtype=torch.float16, run=by_steps, capability=TURING),
}


@cache
def sharp_model(dtype: torch.dtype, window: int | None = None) -> Model:
    """A model whose attention is far from uniform, so that a wrong scale or a key too few shows in the logits."""
    loaded = model(CUDA, dtype, window=window)
    with torch.no_grad():
        for name, parameter in loaded.module.named_parameters():
            if "q_proj" in name:
                parameter *= 12
    return loaded


@cache
def outcome(name: str, *, fused: bool) -> tuple[Tensor, set[KernelCall]]:
    """Logits (steps, B, V) of a way with the fused kernels or without, and the calls of kernels that it made."""
    way = WAYS[name]
    with pytest.MonkeyPatch.context() as changed, NotingCalls() as noting:
        if way.capability is not None:
            changed.setattr(torch.cuda, "get_device_capability", lambda *_: way.capability)
        if not fused:
            changed.setattr(attention, "_kernel", lambda *_: None)
        logits = way.run(sharp_model(way.dtype, way.window), way.lengths)
    return logits.float().cpu(), noting.made


@pytest.mark.parametrize("name", WAYS)
def test_logits_are_those_of_the_fallback(name: str) -> None:
    way, tolerance = WAYS[name], TOLERANCE[WAYS[name].dtype]
    if way.dtype != torch.float32 and way.capability is None:
        require_flash_attention()
    (ours, calls), (plain, no_calls) = (outcome(name, fused=fused) for fused in (True, False))
    assert calls and not no_calls
    torch.testing.assert_close(ours, plain, atol=tolerance, rtol=0)
    best = plain.topk(2).values
    is_clear = best[..., 0] - best[..., 1] > tolerance
    assert is_clear.any() and torch.equal(ours.argmax(dim=-1)[is_clear], plain.argmax(dim=-1)[is_clear])


def test_every_fused_kernel_was_called() -> None:
    """A kernel, or a flag of one, that none of the ways above comes to needs a way of its own."""
    require_flash_attention()
    made = {call for name in WAYS for call in outcome(name, fused=True)[1]}
    assert made == calls_in_source()


def by_family(family: str, dtype: torch.dtype, width: float, *, fused: bool) -> Tensor:
    """Logits (steps, B, V) of a small model of a family, replayed where its steps are.

    Args:
        width: of the weights, in those of tests/families.py, which are wide.
    """
    module = build(family, dtype=torch.float32)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter *= width
    with pytest.MonkeyPatch.context() as changed:
        if not fused:
            changed.setattr(attention, "_kernel", lambda *_: None)
        loaded = Model(module.to(CUDA, dtype), name=family)
        lengths = LENGTHS if loaded.uneven_limit is None else LENGTHS[:1]
        return by_steps(loaded, lengths, fixed=fused and loaded.repeats_steps).float().cpu()


READS = ("gpt2", "jetmoe")
"""Families whose own code reads numbers of each step, so that no graph can hold it: padding, and sizes of experts."""
QUICK = ("gpt2", "falcon", "mistral", "gpt_oss")
"""Learned positions, one kernel for queries, keys and values, windows, and sinks."""

FAMILY_NAMES = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
    for family in (*FAMILIES, *SHARING, *MARKING)
]


@pytest.mark.parametrize("family", QUICK)
def test_families_in_bfloat16(family: str) -> None:
    require_flash_attention()
    ours, plain = (by_family(family, torch.bfloat16, 1 / 3, fused=fused) for fused in (True, False))
    scale = 1 / (3 * plain.std().item())  # to logits most of which are in [-1, 1], as above
    torch.testing.assert_close(ours * scale, plain * scale, atol=TOLERANCE[torch.bfloat16], rtol=0)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_wide_families_in_bfloat16_are_as_near_to_float32_as_the_fallback(family: str) -> None:
    """Each wrong key shows where attention is far from uniform, but a rounding grows there from layer to layer.

    To 0.04 of the logits' spread at least, and beyond all of it where experts are exchanged, with the kernels and
    without. So the two errors are compared: that of the kernels was 0.7 to 1.2 times the fallback's.
    """
    require_flash_attention()
    # Rounding grows to 0.17 of the spread of gemma4_text's logits, and to all of it with other widths, by transformers'
    # own attention, too; a model is refused above 0.2.
    width = 0.5 if family == "gemma4_text" else 1
    ours, plain, exact = (
        by_family(family, dtype, width, fused=fused)
        for dtype, fused in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False))
    )
    errors = [(found - exact).square().mean().sqrt().item() for found in (ours, plain)]
    assert errors[0] <= 1.5 * errors[1], errors
