"""XAttention's choice of blocks, from all products of queries and keys, in plain PyTorch and Python."""

# Legend: N query heads, K kv heads, T tokens, c cells, H head dim.

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from runahead.attention.sparse.choice import ChoiceRule

BLOCK = 128


def chosen_by_all_products(
    q_NTH: Tensor, k_KTH: Tensor, scaling: float, rule: ChoiceRule, pad: int = 0, softcap: float | None = None
) -> Tensor:
    """Blocks (K, q, k) of a row without its padding, from the block of its first token on."""
    num_tokens, group = q_NTH.shape[1], len(q_NTH) // len(k_KTH)
    at = torch.arange(pad, pad + num_tokens)
    cell_T = at // rule.stride - pad // rule.stride
    mean_cT = torch.nn.functional.one_hot(cell_T).to(q_NTH.dtype).T
    mean_cT = mean_cT / mean_cT.sum(dim=1, keepdim=True)
    products_NTT = q_NTH @ k_KTH.repeat_interleave(group, dim=0).mT * scaling
    scores_Ncc = mean_cT @ products_NTT @ mean_cT.T
    if softcap is not None:
        scores_Ncc = softcap * torch.tanh(scores_Ncc / softcap)
    hidden = torch.ones_like(scores_Ncc[0]).triu(1).bool()
    shares_Ncc = scores_Ncc.masked_fill(hidden, -math.inf).softmax(dim=-1)
    block_c = (torch.arange(len(mean_cT)) + pad // rule.stride) // (BLOCK // rule.stride) - pad // BLOCK
    of_block = torch.nn.functional.one_hot(block_c).to(q_NTH.dtype)
    masses = (of_block / of_block.sum(dim=0)).T @ shares_Ncc @ of_block
    masses_Kqk = masses.unflatten(0, (-1, group)).mean(dim=1)
    found = torch.zeros_like(masses_Kqk, dtype=torch.bool)
    for head, masses_qk in enumerate(masses_Kqk.tolist()):
        for block, masses_k in enumerate(masses_qk):
            found[head, block, list(_chosen(masses_k, block, rule))] = True
    return found


def _chosen(masses: list[float], own: int, rule: ChoiceRule) -> Iterator[int]:
    """Numbers of the blocks that one block of queries sees."""
    covered, taken = 0.0, 0
    order = sorted(range(own + 1), key=lambda each: (each not in (0, own), -masses[each]))
    for each in order:
        if rule.density is not None:
            goes_on = taken < math.ceil(rule.density * (own + 1))
        else:
            goes_on = covered < rule.threshold or rule.threshold == 1
        if goes_on or each in (0, own):
            covered, taken = covered + masses[each], taken + 1
            yield each
