"""The fused attention kernels of a GPU, computed plainly, with what they refuse and what they leave undefined.

Written after torch's aten/src/ATen/native/transformers/cuda (attention.cu, flash_attn/flash_api.cpp) at 2.13.
"""

# Legend: B batch, N query heads, K kv heads, C queries, S keys, H head dim, T tokens of all sequences.

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
MOST_HEAD_DIM = 256


class Refused(RuntimeError):
    """A kernel does not take such input; on a GPU it raises, or reads what it should not."""


def require(holds: bool, rule: str, *found: object) -> None:
    """Raises: Refused."""
    if not holds:
        raise Refused(f"{rule}, found {', '.join(map(str, found))}")


def flash(
    q_BNCH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten._scaled_dot_product_flash_attention`."""
    require(dropout_p == 0.0 and not return_debug_mask, "no dropout is emulated", dropout_p, return_debug_mask)
    _require_flash(*(x.transpose(1, 2) for x in (q_BNCH, k_BKSH, v_BKSH)))
    out, lse = _attention(q_BNCH, k_BKSH, v_BKSH, scale, _window(is_causal, None, None, k_BKSH.shape[2]))
    none = torch.empty(0, dtype=torch.long)
    return _heads_inside(out), lse, None, None, q_BNCH.shape[2], k_BKSH.shape[2], none, none, torch.empty(0)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """`aten._flash_attention_forward`, of a batch (B, C, N, H), or of sequences (T, N, H) where `cum_seq_q` is given.

    A query sees the keys from `window_size_left` before its own place to `window_size_right` behind it, where the last
    query has the last key's place; None and -1 are no limit.
    """
    require(dropout_p == 0.0 and not return_debug_mask, "no dropout is emulated", dropout_p, return_debug_mask)
    require(block_table is None, "no paged keys are emulated", block_table)
    _require_flash(q, k, v)
    none = torch.empty(0, dtype=torch.long)
    if alibi_slopes is not None:
        require(
            alibi_slopes.dtype == torch.float32 and alibi_slopes.stride(-1) == 1,
            "ALiBi slopes are float32 and contiguous",
            alibi_slopes.dtype,
            alibi_slopes.stride(),
        )
    if cum_seq_q is None or cum_seq_k is None:
        require(cum_seq_q is None and cum_seq_k is None, "both or none of cum_seq_q and cum_seq_k are given", cum_seq_q)
        require(seqused_k is None, "seqused_k is for sequences", seqused_k)
        window = _window(is_causal, window_size_left, window_size_right, k.shape[1])
        q_BNCH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _attention(q_BNCH, k_BKSH, v_BKSH, scale, window, slopes=alibi_slopes, empty=math.inf)
        return out.transpose(1, 2).contiguous(), lse, none, none, torch.empty(0)
    num_sequences = len(cum_seq_q) - 1
    for name, lengths, size in (
        ("cum_seq_q", cum_seq_q, num_sequences + 1),
        ("cum_seq_k", cum_seq_k, num_sequences + 1),
        ("seqused_k", seqused_k, num_sequences),
    ):
        if lengths is not None:
            require(
                lengths.dtype == torch.int32 and lengths.is_contiguous() and lengths.shape == (size,),
                f"{name} is contiguous, int32 and has a number per sequence",
                lengths.dtype,
                lengths.shape,
                lengths.stride(),
            )
    # As in flash_api.cpp: with one query per sequence the causal mask hides nothing.
    is_causal = is_causal and (max_q > 1 or alibi_slopes is not None)
    out_TNH = torch.full(q.shape, math.nan, dtype=q.dtype)
    lse_NT = torch.full((q.shape[1], q.shape[0]), math.nan, dtype=torch.float32)
    starts_q, starts_k = cum_seq_q.tolist(), cum_seq_k.tolist()
    used = [end - start for start, end in pairwise(starts_k)]
    if seqused_k is not None:
        used = seqused_k.tolist()
    for i, num_keys in enumerate(used):
        queries, keys = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i] + num_keys)
        num_queries = queries.stop - queries.start
        require(num_queries <= max_q and num_keys <= max_k, "max_q and max_k bound lengths", num_queries, num_keys)
        require(keys.stop <= len(k), "a sequence's keys are inside the tensor", keys, len(k))
        if num_queries == 0:
            continue
        if num_keys == 0:
            out_TNH[queries] = 0.0 if max_q > 1 else math.nan  # nobody may use what is there
            lse_NT[:, queries] = math.inf
            continue
        window = _window(is_causal, window_size_left, window_size_right, max_k)
        slopes = alibi_slopes[i] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        q_1NCH, k_1KSH, v_1KSH = (x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys]))
        out, lse = _attention(q_1NCH, k_1KSH, v_1KSH, scale, window, slopes=slopes, empty=math.inf)
        out_TNH[queries], lse_NT[:, queries] = out[0].transpose(0, 1), lse[0]
    return out_TNH, lse_NT, none, none, torch.empty(0)


def efficient(
    q_BNCH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`aten._scaled_dot_product_efficient_attention`: causal from the top left, log-sum-exps padded to 32 queries."""
    require(dropout_p == 0.0, "no dropout is emulated", dropout_p)
    require(q_BNCH.shape[1] == k_BNSH.shape[1] == v_BNSH.shape[1], "one KV head per query head", k_BNSH.shape)
    multiple = 4 if q_BNCH.dtype == torch.float32 else 8
    for name, x in (("query", q_BNCH), ("key", k_BNSH), ("value", v_BNSH)):
        _require_aligned(name, x, multiple)
    if attn_bias is not None:
        require(attn_bias.dtype == q_BNCH.dtype, "attn_bias has the query's dtype", attn_bias.dtype, q_BNCH.dtype)
        _require_aligned("attn_bias", attn_bias.expand(*q_BNCH.shape[:3], k_BNSH.shape[2]), multiple)
    num_queries = q_BNCH.shape[2]
    upper = 0 if is_causal else None
    out, lse = _attention(
        q_BNCH, k_BNSH, v_BNSH, scale, (None, upper), bias=attn_bias, shift=0 if is_causal else None, empty=-math.inf
    )
    lse = torch.nn.functional.pad(lse, (0, -num_queries % 32), value=math.inf)
    if not compute_log_sumexp:
        lse = lse[:, :, :0]
    none = torch.empty(0, dtype=torch.long)
    return _heads_inside(out), lse, none, none


def rms_norm(x: Tensor, dims: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """`aten::_fused_rms_norm`: output, and 1 / root mean square in float32, one kernel on a GPU alone."""
    require(weight is None or weight.dtype is x.dtype, "weight has the dtype of the input", x.dtype)
    wide, places = x.float(), tuple(range(-len(dims), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = (wide.square().mean(places, keepdim=True) + eps).rsqrt()
    out = wide * scale if weight is None else wide * scale * weight.float()
    return out.to(x.dtype), scale


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_fused_rms_norm": rms_norm,
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_flash_attention_forward": flash_forward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
}
"""Operations that only a GPU has, by name, over CPU tensors."""

Window = tuple[int | None, int | None]
"""Keys that a query sees before and behind its place; None is no limit."""


def _window(is_causal: bool, left: int | None, right: int | None, num_keys: int) -> Window:
    """The window as flash_api.cpp reads it."""
    left = None if left is None or left < 0 or left >= num_keys else left
    right = 0 if is_causal else None if right is None or right < 0 or right >= num_keys else right
    return left, right


def _attention(
    q_BNCH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    scale: float | None,
    window: Window,
    *,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    shift: int | None = None,
    empty: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (B, N, C), in the precision of the kernels: scores in float32, weights in half.

    Args:
        slopes: ALiBi's, (N) or (B, N).
        shift: key position of the first query; by default the last query has the last key's place.
        empty: log-sum-exp of a query that sees no key.
    """
    wide = torch.promote_types(q_BNCH.dtype, torch.float32)
    group, num_queries, num_keys = q_BNCH.shape[1] // k_BKSH.shape[1], q_BNCH.shape[2], k_BKSH.shape[2]
    k_BNSH, v_BNSH = k_BKSH.to(wide), v_BKSH.to(wide)
    if group > 1:
        k_BNSH, v_BNSH = (x.repeat_interleave(group, dim=1) for x in (k_BNSH, v_BNSH))
    scores = q_BNCH.to(wide) @ k_BNSH.transpose(-1, -2) * (q_BNCH.shape[-1] ** -0.5 if scale is None else scale)
    keys_S = torch.arange(num_keys)
    places_C1 = torch.arange(num_queries)[:, None] + (num_keys - num_queries if shift is None else shift)
    left, right = window
    if slopes is not None:
        # A causal kernel adds slope * key, which differs from ALiBi by a number per query: so does its log-sum-exp.
        is_causal = left is None and right == 0
        distances_CS = keys_S.expand(num_queries, -1) if is_causal else -(places_C1 - keys_S).abs()
        scores = scores + slopes.to(wide)[..., None, None] * distances_CS
    if bias is not None:
        scores = scores + bias.to(wide)
    if left is not None:
        scores = scores.masked_fill(keys_S < places_C1 - left, -math.inf)
    if right is not None:
        scores = scores.masked_fill(keys_S > places_C1 + right, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num_(0.0)
    if q_BNCH.dtype in HALF:
        weights = weights.to(q_BNCH.dtype).to(wide)
    out = (weights @ v_BNSH).to(q_BNCH.dtype)
    return out, lse.masked_fill(lse == -math.inf, empty).to(torch.float32)


def _heads_inside(out_BNCH: Tensor) -> Tensor:
    """The same numbers with the heads of a token side by side, as the kernels write them."""
    return out_BNCH.transpose(1, 2).contiguous().transpose(1, 2)


def _require_flash(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check queries, keys and values (..., heads, H) as FlashAttention does. Raises: Refused."""
    require(q.dtype in HALF, "FlashAttention takes float16 and bfloat16", q.dtype)
    require(q.dtype == k.dtype == v.dtype, "queries, keys and values have one dtype", q.dtype, k.dtype, v.dtype)
    head_dim = q.shape[-1]
    require(k.shape[-1] == v.shape[-1] == head_dim, "one head dimension", q.shape, k.shape, v.shape)
    require(
        head_dim % 8 == 0 and head_dim <= MOST_HEAD_DIM, "the head dimension is a multiple of 8 up to 256", head_dim
    )
    require(q.shape[-2] % k.shape[-2] == 0, "query heads are a multiple of KV heads", q.shape, k.shape)
    for name, x in (("query", q), ("key", k), ("value", v)):
        _require_aligned(name, x, 8)


def _require_aligned(name: str, x: Tensor, multiple: int) -> None:
    """Rows begin at multiples of 16 bytes and are contiguous. Raises: Refused."""
    require(x.stride(-1) == 1 or x.shape[-1] == 1, f"{name} is contiguous in its last dimension", x.stride())
    steps = [step for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    is_aligned = all(step % multiple == 0 for step in steps) and x.data_ptr() % 16 == 0
    require(is_aligned, f"{name} is aligned to 16 bytes", x.stride(), tuple(x.shape), f"address {x.data_ptr():#x}")
