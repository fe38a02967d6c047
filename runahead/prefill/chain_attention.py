"""Attention of one rank's chunk in a chain of ranks: the loop body of KV-Runahead's figure, once per layer."""

# Legend: B batch, N query heads, K kv heads, C chunk, H head dim, V value dim.

from __future__ import annotations

from functools import partial

from torch import Tensor

from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore
from runahead.cache.new_tokens import NewTokens
from runahead.prefill.chain_run import ChainRun


class ChainAttention(CausalAttention):
    """Attention of one rank's chunk: the loop body of the paper's figure, once per layer.

    Args:
        run: this rank's part of the prefill.
        cache: stores the chunk after its prefix: the slabs of `run`, or those with reused segments beside them.
    """

    def __init__(self, run: ChainRun, cache: KVStore, *, start: int, pads: list[int]) -> None:
        super().__init__(cache, start=start, pads=pads)
        self.run = run

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.run.open(layer)
        store, tokens = self.cache.layers[layer], self.tokens_in(layer, q_BNCH.shape[2])
        store.append(k_BKCH, v_BKCV, tokens)
        self.run.send(layer)
        seen = store.seen(q_BNCH, tokens)
        out_BNCV = seen.output(terms, partial(self.run.transfer.await_prefix, layer))
        self.after(layer, store, seen, terms)
        self.run.close(layer)
        return out_BNCV

    def tokens_in(self, layer: int, num_new: int) -> NewTokens:
        """Where the `num_new` tokens of this rank are in a layer."""
        return self.tokens
