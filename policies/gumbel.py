"""Gumbel noise that depends on a seed and on places alone, so that the same query and key get the same noise anywhere.

A generator's numbers would depend on what else is in a batch, on padding and on chunks. Here a number is a hash of the
seed, the layer, the query head, and the positions of query and key.
"""

# Legend: B batch, K kv heads, N query heads, G = N / K, q queries, n keys.

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


T = TypeVar("T", int, Tensor)


def hashed(x: T) -> T:
    """A 32-bit hash of integers in [0, 2^32): xorshift and multiplication (github.com/skeeto/hash-prospector).

    The factors are below 2^31, so that products are below 2^63 and int64 does not overflow.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def gumbel(seed: int, layer: int, first_head: int, num_heads: int, queries_Bq: Tensor, keys_BKn: Tensor) -> Tensor:
    """Standard Gumbel noise (B, N, q, n), float32, at most 16.6.

    Args:
        first_head, num_heads: the N query heads, as numbered in the whole model.
        queries_Bq, keys_BKn: positions in the rows; those of keys may be (B, 1, n).
    """
    # Hashed twice, or seed and layer could be exchanged; 0 is the hash of 0, which the constant avoids.
    place = hashed(hashed(hashed((seed ^ 0x9E3779B9) & MASK)) ^ hashed(layer))
    heads_N = torch.arange(first_head, first_head + num_heads, device=queries_Bq.device)
    heads_N = hashed(hashed(heads_N) ^ place)
    of_query_BNq = hashed(heads_N[:, None] ^ hashed(queries_Bq.long() & MASK)[:, None])
    keys_BNn = hashed(keys_BKn.long() & MASK)
    if keys_BNn.shape[1] > 1:
        keys_BNn = keys_BNn.repeat_interleave(num_heads // keys_BNn.shape[1], dim=1)
    bits_BNqn = hashed(of_query_BNq[..., None] ^ keys_BNn[:, :, None])
    # 23 bits and a half, which float32 holds exactly: neither 0 nor 1, whose logarithms are infinite or 0.
    uniform_BNqn = ((bits_BNqn >> 9).float() + 0.5) / (1 << 23)
    return uniform_BNqn.log_().neg_().log_().neg_()
