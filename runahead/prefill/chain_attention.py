"""Attention of one rank's chunk in a chain of ranks: KV-Runahead's loop body, once per layer."""

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
    """Attention of one rank's chunk, as in the figure of the KV-Runahead paper.

    In each layer: store the chunk's keys and values, send them on, attend to the own chunk, await the prefix, attend
    to it.

    Args:
        run: this rank's part of the prefill.
        cache: stores the chunk after its prefix: the slabs of `run`, alone or together with reused segments.
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
        """The new tokens of a layer, whose start is their index in the layer's slab."""
        return self.tokens
