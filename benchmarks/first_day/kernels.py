"""Rates of the kernels that prefill and decoding use on a GPU, and of some that they might use."""

# Legend: B batch (1), C chunk, P prefix, T tokens, N query heads, K KV heads, H head dim, S sequences (1).

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.first_day.visit import Visit
from runahead.attention.partial import (
    AttentionTerms,
    attend,
    attend_sequences,
    blockwise_attention,
    cuda_efficient,
    merge,
)

N, K, H = 32, 8, 128
"""Heads of Llama-3-8B."""

SCALING = H**-0.5
PRODUCT = (16384, 4096, 14336)
"""Rows, inner dim and columns of a product of an MLP."""

CHUNKS = (2048, 8192, 16384, 65536)
PREFIX = 49152
LONGEST_BESIDE_PREFIX = 16384
LENGTHS = (4096, 16384, 65536, 131072)
BLOCKWISE = 8192

Attend = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def measure(visit: Visit) -> None:
    """Results first, then rates."""
    measurements: dict[str, Callable[[Visit], None]] = {
        "results": _results,
        "matrix products": _products,
        **{f"a chunk of {length:,}": partial(_chunk, num_tokens=length) for length in CHUNKS},
        **{f"decoding at {length:,}": partial(_decoding, num_tokens=length) for length in LENGTHS},
        "blockwise attention": _blockwise,
    }
    for name, measurement in measurements.items():
        visit.say(name)
        visit.figures.attempt(name, partial(measurement, visit))
        torch.cuda.empty_cache()


def _keys_and_values(visit: Visit, num_tokens: int, num_heads: int = K) -> tuple[Tensor, Tensor]:
    """Keys and values (B, K, T, H) as the cache has them: token-major, a token's keys beside its values."""
    slab_TBKX = torch.randn(num_tokens, 1, num_heads, 2 * H, device=visit.device, dtype=torch.bfloat16)
    k_BKTH, v_BKTH = slab_TBKX.permute(1, 2, 0, 3).split(H, dim=-1)
    return k_BKTH, v_BKTH


def _queries(visit: Visit, num_tokens: int) -> Tensor:
    return torch.randn(1, num_tokens, N, H, device=visit.device, dtype=torch.bfloat16).transpose(1, 2)


def _ours(q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    start = 0 if own else k_BKTH.shape[2]
    return attend(q_BNCH, k_BKTH, v_BKTH, AttentionTerms(scaling=SCALING), q_start=start, k_start=0)


def _cudnn(q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BNCH, k_BKTH, v_BKTH, None, True, 0.0, own, False, scale=SCALING
    )
    return out, lse.reshape(q_BNCH.shape[:3])


KERNELS: dict[str, Attend] = {"flash": _ours, "cudnn": _cudnn}
"""Kernels by kind of estimate: the runtime's own way, and one that it might take."""


def _results(visit: Visit) -> None:
    """Each kernel against attention in plain operations, where chunk and prefix are no multiples of a block."""
    chunk, prefix, terms = 200, 131, AttentionTerms(scaling=SCALING)
    q_BNCH = _queries(visit, chunk)
    k_BKTH, v_BKTH = _keys_and_values(visit, prefix)
    for own, keys, values in ((True, *_keys_and_values(visit, chunk)), (False, k_BKTH, v_BKTH)):
        start, what = (0, "own chunk") if own else (prefix, "prefix")
        plain = blockwise_attention(q_BNCH, keys, values, terms, q_start=start, k_start=0)
        _compare(visit, f"flash, {what}", _ours(q_BNCH, keys, values, own), plain)
        q, k, v = (x.float() for x in (q_BNCH, keys, values))
        plain_wide = blockwise_attention(q, k, v, terms, q_start=start, k_start=0)
        _compare(visit, f"efficient, {what}", cuda_efficient(q, k, v, own, SCALING), plain_wide)
        visit.figures.attempt(
            f"cudnn, {what}",
            partial(_compare_cudnn, visit, f"cudnn, {what}", (q_BNCH, keys, values, own), plain),
            is_ours=False,
        )
    q_BN1H = q_BNCH[:, :, :1]
    starts = torch.tensor([0, prefix], device=visit.device, dtype=torch.int32)
    out_SNH, lse_SN = _sequence(q_BN1H[:, :, 0], k_BKTH[0].transpose(0, 1), v_BKTH[0].transpose(0, 1), starts)
    plain = blockwise_attention(q_BN1H, k_BKTH, v_BKTH, terms, q_start=prefix, k_start=0)
    _compare(visit, "flash, sequences", (out_SNH[:, :, None], lse_SN[:, :, None]), plain)


def _compare_cudnn(
    visit: Visit, name: str, inputs: tuple[Tensor, Tensor, Tensor, bool], plain: tuple[Tensor, Tensor]
) -> None:
    _compare(visit, name, _cudnn(*inputs), plain)


def _compare(visit: Visit, name: str, found: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]) -> None:
    differences = [(a.float() - b.float()).abs().max() for a, b in zip(found, plain, strict=True)]
    apart = torch.stack(differences).max().item()  # NaN if one is; Python's max() may drop it
    # A few units in the last place of bfloat16, for outputs and log-sum-exps of a size near 1.
    visit.figures.check(name, apart <= 4e-2, measured=f"{apart:.1e} apart", otherwise="plain operations say otherwise")


def _products(visit: Visit) -> None:
    rows, inner, columns = PRODUCT
    x_TD = torch.randn(rows, inner, device=visit.device, dtype=torch.bfloat16)
    w_FD = torch.randn(columns, inner, device=visit.device, dtype=torch.bfloat16)
    ms = visit.median_ms(lambda: torch.nn.functional.linear(x_TD, w_FD))
    visit.figures.note(f"{rows:,} x {inner:,} x {columns:,}", 2 * x_TD.numel() * columns / ms / 1e9, "matrix products")
    ms = visit.median_ms(lambda: torch.nn.functional.linear(x_TD[:1], w_FD), times=50)
    visit.figures.note(f"1 x {inner:,} x {columns:,}", w_FD.nbytes / ms / 1e6, "one row")


def _chunk(visit: Visit, *, num_tokens: int) -> None:
    """Attention of a chunk to itself and to a prefix, and the merging of both."""
    q_BNCH = _queries(visit, num_tokens)
    own = _keys_and_values(visit, num_tokens)
    prefix = _keys_and_values(visit, PREFIX) if num_tokens <= LONGEST_BESIDE_PREFIX else None
    for kind, kernel in KERNELS.items():
        flops = 4 * N * H * num_tokens

        def rates(kind: str = kind, kernel: Attend = kernel, flops: int = flops) -> None:
            ms = visit.median_ms(lambda: kernel(q_BNCH, *own, True), times=3)
            visit.figures.note(f"{kind}, own chunk of {num_tokens:,}", flops * num_tokens / 2 / ms / 1e9, kind)
            if prefix is not None:
                ms = visit.median_ms(lambda: kernel(q_BNCH, *prefix, False), times=3)
                visit.figures.note(f"{kind}, {num_tokens:,} after {PREFIX:,}", flops * PREFIX / ms / 1e9, kind)

        visit.figures.attempt(f"{kind}, {num_tokens:,}", rates, is_ours=kernel is _ours)
    if prefix is not None:
        parts = (*_ours(q_BNCH, *own, True), *_ours(q_BNCH, *prefix, False))
        ms = visit.median_ms(lambda: merge(*parts))
        visit.figures.note(f"merging, {num_tokens:,}", ms, "merge", q_BNCH.numel())


def _sequence(q_SNH: Tensor, k_TUH: Tensor, v_TUH: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one sequence's query to all its keys, as a decoding step has it.

    Args:
        starts: 0 and the number of keys, on the GPU: copying them there waits, which is no part of a step.
    """
    k_1UTH, v_1UTH = (x.transpose(0, 1)[None] for x in (k_TUH, v_TUH))
    longest = len(k_TUH)
    return attend_sequences(q_SNH, k_1UTH, v_1UTH, starts=starts, used_S=starts[1:], longest=longest, scaling=SCALING)


def _decoding(visit: Visit, *, num_tokens: int) -> None:
    """Decoding with grouped queries and without, also with every query twice, so that the kernel splits the keys."""
    q_SNH = torch.randn(1, N, H, device=visit.device, dtype=torch.bfloat16)
    starts = torch.tensor([0, num_tokens], device=visit.device, dtype=torch.int32)
    for name, num_heads, queries in (
        ("grouped queries", K, q_SNH),
        ("a KV head per query head", N, q_SNH),
        ("a KV head per query head, queries twice", N, q_SNH.repeat_interleave(2, dim=1)),
    ):
        k_TUH, v_TUH = (x[0].transpose(0, 1) for x in _keys_and_values(visit, num_tokens, num_heads))
        ms = visit.median_ms(partial(_sequence, queries, k_TUH, v_TUH, starts), times=20)
        visit.figures.note(f"{name}, {num_tokens:,}", 2 * k_TUH.nbytes / ms / 1e6, "decoding attention")


def _blockwise(visit: Visit) -> None:
    """Time of attention block by block, which windows, soft caps and ALiBi need."""
    num_tokens, terms = BLOCKWISE, AttentionTerms(scaling=SCALING)
    q_BNCH, (k_BKTH, v_BKTH) = _queries(visit, num_tokens), _keys_and_values(visit, num_tokens)
    ms = visit.median_ms(lambda: blockwise_attention(q_BNCH, k_BKTH, v_BKTH, terms, q_start=0, k_start=0), times=1)
    visit.figures.note(f"blockwise, own chunk of {num_tokens:,}", ms, "ms")
