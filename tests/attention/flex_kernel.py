"""FlexAttention's kernel for GPUs in plain PyTorch: blocks of queries read the blocks of keys that are listed for them.

Written after torch's _inductor/kernel/flex/templates/flex_attention.py.jinja at 2.13: pairs are masked in the blocks of
`kv_indices` alone, and a query that sees no key has output 0 and log-sum-exp -inf.
"""

# Legend: B batch, N query heads, K kv heads, C queries, S keys, H head dim (key), V head dim (value).

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

LEAST_HEAD_DIM = 16


def attend_by_list(
    q_BNCH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    return_aux: AuxRequest,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, AuxOutput]:
    """`flex_attention` compiled for a GPU."""
    num_heads, num_queries, num_keys = q_BNCH.shape[1], q_BNCH.shape[2], k_BKSH.shape[2]
    group = num_heads // k_BKSH.shape[1]
    assert min(q_BNCH.shape[3], v_BKSV.shape[3]) >= LEAST_HEAD_DIM, "narrower heads are not implemented"
    assert enable_gqa or group == 1, "one KV head per query head"
    assert block_mask.seq_lengths == (num_queries, num_keys), (block_mask.seq_lengths, num_queries, num_keys)
    assert return_aux.lse and kernel_options == {"BACKEND": "TRITON"}
    wide = torch.promote_types(q_BNCH.dtype, torch.float32)
    k_BNSH, v_BNSV = (x.repeat_interleave(group, dim=1).to(wide) for x in (k_BKSH, v_BKSV))
    scores = q_BNCH.to(wide) @ k_BNSH.mT * scale
    kept = scores.new_full(scores.shape, -math.inf)
    masked, full = (block_mask.kv_num_blocks, block_mask.kv_indices), None
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    size_q, size_k = block_mask.BLOCK_SIZE
    every_key = torch.arange(num_keys, device=q_BNCH.device)
    for is_full, (counts, indices) in ((False, masked), *(() if full is None else ((True, full),))):
        assert counts.dtype == indices.dtype == torch.int32 and counts.is_contiguous() and indices.is_contiguous()
        assert counts.shape[:2] == q_BNCH.shape[:2], "heads of a mask are taken in turn"
        lists = counts.tolist(), indices.tolist()
        for row, head, block in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
            queries = torch.arange(block * size_q, min((block + 1) * size_q, num_queries), device=q_BNCH.device)
            for number in lists[1][row][head][block][: lists[0][row][head][block]]:
                keys = every_key[number * size_k : (number + 1) * size_k]
                place = row, head, slice(block * size_q, (block + 1) * size_q), slice(number * size_k, None)
                found = scores[place][:, : len(keys)]
                if not is_full:
                    at = torch.full((), row, device=keys.device), torch.full((), head, device=keys.device)
                    sees = block_mask.mask_mod(*at, queries[:, None], keys)
                    found = torch.where(sees, found, -math.inf)
                kept[place][:, : len(keys)] = found
    lse_BNC = kept.logsumexp(dim=-1)
    out_BNCV = kept.softmax(dim=-1).nan_to_num(0.0) @ v_BNSV
    return out_BNCV.to(q_BNCH.dtype), AuxOutput(lse=lse_BNC)
