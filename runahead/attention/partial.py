"""Partial attention: attention to a subset of the keys as (output, log-sum-exp), and the exact merge of two such parts.

Distributed, sparse and offloaded attention consist of these two steps. Merging is exact: with o_i the attention over
key set i and z_i the log-sum-exp of its scores, attention over the union is sum_i exp(z_i - z) o_i, z = logsumexp z_i.
"""

# Legend: B batch, N query heads, K kv heads, C queries, S keys, H head dim (key), V head dim (value).

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from runahead.attention.masks import MaskRule
from runahead.kernels import operators
from runahead.kernels.operators import KERNELS

QUERY_BLOCK = 256
KEY_BLOCK = 1024
# One block of scores is N x QUERY_BLOCK x KEY_BLOCK: the memory of the fallback does not grow with the prompt.
FEW_QUERIES = 16
# Up to so many queries read keys once for all heads of a group on a CPU.


KeyBias: TypeAlias = Callable[[Tensor], Tensor]
"""Key positions (S), or (B, N, S) if they differ between rows and heads -> additive bias (N, S) or (B, N, S)."""


@dataclass(frozen=True, kw_only=True)
class AttentionTerms:
    """Terms that a model family adds to softmax(q k^T * scaling) v."""

    scaling: float
    rule: MaskRule | None = None
    """The keys that each query sees; None is causal attention."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap) (Gemma 2)."""
    key_bias: KeyBias | None = None
    """ALiBi; softmax cancels any bias that depends on the query alone."""
    sinks_N: Tensor | None = None
    """One extra logit per query head in the softmax's denominator (gpt-oss)."""
    marked_window: int | None = None
    """Number of queries that see a marked key, see `runahead.attention.marked`; None: no keys are marked."""
    sees_own: bool = True
    """A query sees the key of its own token; else only those before it."""

    @property
    def needs_scores(self) -> bool:
        """Whether scores are modified before the softmax, which fused kernels do not support."""
        return self.softcap is not None or self.key_bias is not None

    @property
    def sees_all(self) -> bool:
        """Whether every query sees all keys before it."""
        return self.rule is None

    @property
    def by_order(self) -> bool:
        """Whether of positions the order alone counts: every query sees all keys before it, without a bias."""
        return self.sees_all and self.key_bias is None


def biased(key_bias: KeyBias, positions_BKS: Tensor, num_heads: int) -> Tensor:
    """Bias (B, N, S) of keys at positions that differ between rows, and between KV heads or not (B, 1, S)."""
    num_kv_heads = positions_BKS.shape[1]
    if num_kv_heads > 1:
        positions_BKS = positions_BKS.repeat_interleave(num_heads // num_kv_heads, dim=1)
    return key_bias(positions_BKS)


def attend(
    q_BNCH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, terms: AttentionTerms, *, q_start: int, k_start: int
) -> tuple[Tensor, Tensor]:
    """Attention of queries [q_start, q_start + C) to keys [k_start, k_start + S), counted in positions of their row.

    The keys are the queries' own chunk (k_start == q_start and S == C), or all lie before the queries, or end with the
    last query (decoding; of several queries where `takes_own_with_earlier`).

    Returns:
        output (B, N, C, V) in the query's dtype, log-sum-exp (B, N, C) in float32 (float64 for float64 input);
        a query that sees no key has output 0 and log-sum-exp -inf.
    """
    num_queries, num_keys = q_BNCH.shape[2], k_BKSH.shape[2]
    if num_queries == 0 or num_keys == 0:  # the CPU flash kernel divides by these
        return _no_keys(q_BNCH, v_BKSV)
    own = k_start == q_start and num_keys == num_queries
    q_end, k_end = q_start + num_queries, k_start + num_keys
    joined = k_end == q_end and (num_queries == 1 or takes_own_with_earlier(q_BNCH, v_BKSV.shape[-1], terms))
    assert own or k_end <= q_start or joined, (q_start, q_end, k_start, k_end)
    plain = terms.rule is None or terms.rule.is_causal(q_start, q_end, min(k_start, q_start))
    kernel = None if terms.needs_scores else fused_kernel(q_BNCH, k_BKSH, v_BKSV)
    if plain and kernel is not None:
        return kernel(q_BNCH, k_BKSH, v_BKSV, k_end == q_end and num_queries > 1, terms.scaling)
    if kernel is operators.attend and terms.rule is not None:
        firsts_C = terms.rule.first_keys(q_start, q_end)
        if firsts_C is not None:
            is_causal = k_end == q_end and num_queries > 1
            return operators.attend(q_BNCH, k_BKSH, v_BKSV, is_causal, terms.scaling, firsts_C, k_start)
    if kernel is _cuda_flash and terms.rule is not None:
        window = terms.rule.window(q_start, q_end)
        if window is not None:
            return _cuda_flash_of_window(q_BNCH, k_BKSH, v_BKSV, window, q_end - k_end, terms.scaling)
    return blockwise_attention(q_BNCH, k_BKSH, v_BKSV, terms, q_start=q_start, k_start=k_start)


def takes_own_with_earlier(q_BNCH: Tensor, value_dim: int, terms: AttentionTerms) -> bool:
    """Whether a kernel takes several queries' own chunk and what lies before it in one call."""
    is_plain = not terms.needs_scores
    return is_plain and _kernel(q_BNCH.device, q_BNCH.dtype, q_BNCH.shape[-1], value_dim) is operators.attend


def merge(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    may_see_none: bool = True,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets: outputs (B, N, C, V), log-sum-exps (B, N, C).

    The sigmoid form: weights from differences of log-sum-exps, so that nothing overflows. The output has the dtype of
    the log-sum-exp: it is rounded to the model's once all parts are merged.

    Args:
        may_see_none: whether a query may see no key of either set.
        in_place: write the union over the first set, whose output has the dtype of its log-sum-exp.
    """
    weight_b = torch.sigmoid(lse_b - lse_a)
    if may_see_none:
        weight_b.nan_to_num_(0.0)
    # A conversion to the same dtype is a call, too.
    out_a, out_b = (out if out.dtype == weight_b.dtype else out.to(weight_b.dtype) for out in (out_a, out_b))
    if in_place:
        return out_a.lerp_(out_b, weight_b.unsqueeze(-1)), torch.logaddexp(lse_a, lse_b, out=lse_a)
    return torch.lerp(out_a, out_b, weight_b.unsqueeze(-1)), torch.logaddexp(lse_a, lse_b)


def merge_parts(out_PBNCV: Tensor, lse_PBNC: Tensor) -> Tensor:
    """Output (B, N, C, V) of P parts, whose log-sum-exp is `torch.logsumexp(lse_PBNC, dim=0)`.

    They are merged in their order, so that whoever merges the same parts has the same bits. A query that sees no key
    in a part has log-sum-exp -inf there, and sees one in another part.
    """
    return (out_PBNCV * torch.softmax(lse_PBNC, dim=0).unsqueeze(-1)).sum(dim=0)


def blockwise_attention(
    q_BNCH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, terms: AttentionTerms, *, q_start: int, k_start: int
) -> tuple[Tensor, Tensor]:
    """`attend` in plain PyTorch, for every term and every dtype, in O(block) memory."""
    num_queries, num_keys = q_BNCH.shape[2], k_BKSH.shape[2]

    def seen(row: int, end: int) -> range:
        first = 0 if terms.rule is None else max(0, terms.rule.first_key(q_start + row) - k_start)
        return range(first, min(num_keys, q_start + end - k_start))

    queries_C = torch.arange(q_start, q_start + num_queries, device=q_BNCH.device)
    keys_S = torch.arange(k_start, k_start + num_keys, device=q_BNCH.device)
    return attend_at(q_BNCH, k_BKSH, v_BKSV, terms, queries_C, keys_S, seen)


def attend_at(
    q_BNCH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    terms: AttentionTerms,
    queries_C: Tensor,
    keys_S: Tensor,
    seen: Callable[[int, int], range] | None = None,
    sees: Callable[[slice, slice], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys at arbitrary positions, in any order, in O(block) memory.

    Args:
        queries_C, keys_S: positions; a query sees keys up to its own position.
        seen: the keys, as a range of indices, that at least one of the queries [first, end) sees; None is all keys.
        sees: (queries, keys) -> whether each of these sees each, (B, K, 1, q, s), if not by the rule.

    Returns:
        as `attend`.
    """
    outs, lses = [], []
    num_queries, every_key = q_BNCH.shape[2], range(len(keys_S))
    for row in range(0, num_queries, QUERY_BLOCK):
        end = min(row + QUERY_BLOCK, num_queries)
        q_block, queries, keys = q_BNCH[:, :, row:end], queries_C[row:end], seen(row, end) if seen else every_key
        out, lse = _no_keys(q_block, v_BKSV, torch.promote_types(q_BNCH.dtype, torch.float32))
        for col in keys[::KEY_BLOCK]:
            span = slice(col, min(col + KEY_BLOCK, keys.stop))
            k_block, v_block = k_BKSH[:, :, span], v_BKSV[:, :, span]
            allowed = _allowed(terms, queries, keys_S[span]) if sees is None else sees(slice(row, end), span)
            out, lse = merge(out, lse, *_scored_block(q_block, k_block, v_block, terms, keys_S[span], allowed))
        outs.append(out.to(q_BNCH.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _allowed(terms: AttentionTerms, queries_C: Tensor, keys_S: Tensor) -> Tensor:
    """Whether queries see keys (C, S) at these positions."""
    if terms.rule is None:
        return keys_S[None, :] <= queries_C[:, None]
    return terms.rule.allowed(queries_C, keys_S)


def _scored_block(
    q_BNCH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, terms: AttentionTerms, keys_S: Tensor, allowed_CS: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one block, from its scores; both in at least float32."""
    wide = torch.promote_types(q_BNCH.dtype, torch.float32)
    num_kv_heads = k_BKSH.shape[1]
    q_BKGCH = q_BNCH.unflatten(1, (num_kv_heads, -1))
    scores = (q_BKGCH @ k_BKSH.unsqueeze(2).transpose(-1, -2)).to(wide) * terms.scaling
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    if terms.key_bias is not None:
        scores = scores + terms.key_bias(keys_S).to(wide).unflatten(-2, (num_kv_heads, -1)).unsqueeze(-2)
    scores = scores.masked_fill(~allowed_CS, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num_(0.0)  # nan: a row with no key, -inf - -inf
    out = weights.to(v_BKSV.dtype) @ v_BKSV.unsqueeze(2)
    return out.flatten(1, 2).to(wide), lse.flatten(1, 2)


def softmax_attention(
    q_BNCH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, scaling: float, hidden_CS: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention in float64 on the CPU, by which kernels are compared: output (B, N, C, V), log-sum-exp (B, N, C).

    Args:
        hidden_CS: whether a query does not see a key. A query that sees none has output 0 and log-sum-exp -inf.
    """
    group = q_BNCH.shape[1] // k_BKSH.shape[1]
    q, k, v = (x.cpu().double() for x in (q_BNCH, k_BKSH, v_BKSV))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT * scaling).masked_fill(hidden_CS, -math.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0) @ v, scores.logsumexp(dim=-1)


def errors(found: tuple[Tensor, Tensor], known: tuple[Tensor, Tensor]) -> Iterator[float]:
    """Largest error of an output and of a log-sum-exp from those of `softmax_attention`; infinite for a NaN."""
    for ours, right in zip(found, known, strict=True):
        ours = ours.cpu().double()
        off = torch.where(right.isfinite(), ours - right, torch.where(ours == right, 0.0, math.inf))
        yield off.abs().max().nan_to_num(math.inf).item()


def _no_keys(q_BNCH: Tensor, v_BKSV: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attention to an empty set of keys: output 0, log-sum-exp -inf."""
    wide = torch.promote_types(q_BNCH.dtype, torch.float32)
    out = q_BNCH.new_zeros(*q_BNCH.shape[:3], v_BKSV.shape[-1], dtype=dtype or q_BNCH.dtype)
    return out, q_BNCH.new_full(q_BNCH.shape[:3], -math.inf, dtype=wide)


Kernel = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]


def fused_kernel(q_BNCH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor) -> Kernel | None:
    """The fused kernel for these tensors, chosen by device, dtype and shape alone, so that runs repeat bit by bit."""
    return _kernel(q_BNCH.device, q_BNCH.dtype, q_BNCH.shape[-1], v_BKSV.shape[-1])


def _kernel(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> Kernel | None:
    if device.type == "cpu" and KERNELS.in_use and operators.take(dtype, head_dim, value_dim):
        return operators.attend
    if value_dim != head_dim:  # latent attention, which no other kernel takes
        return None
    if device.type == "cpu":
        return cpu_flash
    if device.type == "cuda":
        half = dtype in (torch.float16, torch.bfloat16)
        ampere = torch.cuda.get_device_capability(device) >= (8, 0)
        if half and ampere and head_dim % 8 == 0 and head_dim <= 256:
            return _cuda_flash
        if head_dim % (8 if half else 4) == 0 and dtype in (torch.float32, torch.float16):
            return cuda_efficient
    return None


def cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Flash attention on a CPU, optionally with an additive mask.

    It takes strided keys and fewer KV heads than query heads as they are. `causal` aligns queries and keys top left.
    """
    if q.shape[2] <= (1 if causal else FEW_QUERIES) and q.shape[1] > k.shape[1] and mask is None:
        # A group's heads as queries of one head, so that keys are read once for all of them (8k tokens: 1.4x faster).
        out, lse = cpu_flash(q.reshape(len(q), k.shape[1], -1, q.shape[-1]), k, v, False, scaling)
        return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scaling
    )
    return out, lse


def attend_sequences(
    q_SNH: Tensor,
    k_1UTH: Tensor,
    v_1UTV: Tensor,
    *,
    starts: Tensor,
    used_S: Tensor,
    longest: int,
    scaling: float,
    may_be_empty: bool = False,
    places: Sequence[range] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per sequence to all its keys, of which the device knows how many there are.

    Args:
        q_SNH: a query per sequence and head.
        k_1UTH, v_1UTV: keys and values of all sequences, one sequence after another.
        starts: first token of each sequence, and the end of the last (S + 1, int32).
        used_S: tokens of each sequence that are seen, from its first on (int32); at least one unless `may_be_empty`.
        longest: upper bound of `used_S`.
        may_be_empty: a sequence may have no token that is seen.
        places: where those lie that are seen, if the host knows it.

    Returns:
        output (S, N, V) in the query's dtype, log-sum-exp (S, N).
    """
    if q_SNH.device.type == "cpu":
        kernel = _kernel(q_SNH.device, q_SNH.dtype, q_SNH.shape[-1], v_1UTV.shape[-1])
        assert kernel is not None, "a CPU has a kernel for every dtype"
        if kernel is operators.attend:
            return operators.attend_sequences(q_SNH, k_1UTH, v_1UTV, starts, used_S, scaling)
        parts, q_SUGH = [], q_SNH.unflatten(1, (k_1UTH.shape[1], -1))  # a group's heads as queries of one head
        if places is None:
            firsts, counts = starts[:-1].tolist(), used_S.tolist()
            places = [range(first, first + used) for first, used in zip(firsts, counts, strict=True)]
        for i, seen in enumerate(places):
            q, k, v = q_SUGH[i : i + 1], k_1UTH[:, :, seen.start : seen.stop], v_1UTV[:, :, seen.start : seen.stop]
            parts.append(kernel(q, k, v, False, scaling) if seen else _no_keys(q, v))
        return torch.cat([out for out, _ in parts]).flatten(1, 2), torch.cat([lse for _, lse in parts]).flatten(1, 2)
    queries = torch.arange(len(used_S) + 1, dtype=torch.int32, device=q_SNH.device)
    k_TUH, v_TUV = (x.squeeze(0).transpose(0, 1) for x in (k_1UTH, v_1UTV))
    is_ungrouped = q_SNH.shape[1] == k_1UTH.shape[1]
    if is_ungrouped:  # only for heads that share keys does the kernel split these among its blocks
        q_SNH = q_SNH.repeat_interleave(2, dim=1)
    out, lse_NS, *_ = torch.ops.aten._flash_attention_forward(
        q_SNH, k_TUH, v_TUV, queries, starts, 1, longest, 0.0, False, False, scale=scaling, seqused_k=used_S
    )
    if is_ungrouped:
        out, lse_NS = out[:, ::2], lse_NS[::2]
    lse_SN = lse_NS.transpose(0, 1)
    if may_be_empty:
        sees_S1 = (used_S > 0)[:, None]
        out, lse_SN = out.masked_fill(~sees_S1[..., None], 0.0), lse_SN.masked_fill(~sees_S1, -math.inf)
    return out, lse_SN


def takes_sequences(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether `attend_sequences` supports such keys and values."""
    return key_dim == value_dim and _kernel(device, dtype, key_dim, value_dim) in (
        cpu_flash,
        operators.attend,
        _cuda_flash,
    )


def _cuda_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """Flash attention on a GPU: half precision, from Ampere on."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scaling)
    return out, lse


def _cuda_flash_of_window(
    q_BNCH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, window: int, num_later: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """`_cuda_flash`, where each query sees the `window` keys that end with its own position.

    Args:
        num_later: tokens from the last key's position to the last query's: 0, or no query has its own key here.
    """
    num_queries = q_BNCH.shape[2]
    num_seeing = min(num_queries, num_queries - num_later + window - 1)  # those after them see later keys alone
    if num_seeing <= 0:
        return _no_keys(q_BNCH, v_BKSH)
    q_BCNH, k_BSKH, v_BSKH = (x.transpose(1, 2) for x in (q_BNCH[:, :, :num_seeing], k_BKSH, v_BKSH))
    # The kernel counts from the last query, as if it had the last key's position. Below 0 is no limit to it.
    left = window - 1 - (num_later - (num_queries - num_seeing))
    is_causal = num_later == 0 and num_seeing > 1
    out_BCNH, lse_BNC, *_ = torch.ops.aten._flash_attention_forward(
        *(q_BCNH, k_BSKH, v_BSKH, None, None, num_seeing, k_BKSH.shape[2], 0.0, is_causal, False),
        scale=scaling,
        window_size_left=left,
    )
    out_BNCH = out_BCNH.transpose(1, 2)
    if num_seeing == num_queries:
        return out_BNCH, lse_BNC
    rest = _no_keys(q_BNCH[:, :, num_seeing:], v_BKSH)
    return torch.cat((out_BNCH, rest[0]), dim=2), torch.cat((lse_BNC, rest[1]), dim=2)


def cuda_efficient(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Memory-efficient attention on a GPU, optionally with an additive mask: float32, and float16 before Ampere.

    The kernel needs one KV head per query head, and pads the log-sum-exp to 32 queries.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, 0.0, causal, scale=scaling
    )
    return out, lse[:, :, : q.shape[2]]
