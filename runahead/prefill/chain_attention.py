"""Attention of one rank's chunk in a chain of ranks: KV-Runahead's loop body, with and without cache policies."""

# Legend: B batch, N query heads, K kv heads, C chunk, n tokens in the slab, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from policies.row_values import row_values
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.cache.new_tokens import NewTokens, num_tokens_of
from runahead.context import ContextPartition
from runahead.prefill.chain_run import ChainRun
from runahead.reuse.cache import reusing
from runahead.reuse.reused_kv import ReusedKV, WholeTexts
from runahead.thinning.steps import PolicySteps


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
        out_BNCV = seen.output(terms, partial(self.run.await_prefix, layer))
        self.attended(layer, store, seen, terms)
        self.run.close(layer)
        return out_BNCV

    def attend_shared(
        self, layer: int, source: int, q_BNCH: Tensor, terms: AttentionTerms, *, skipped: int = 0
    ) -> Tensor:
        out_BNCV = super().attend_shared(layer, source, q_BNCH, terms, skipped=skipped)
        self.run.job.ranks.progress()
        return out_BNCV

    def tokens_in(self, layer: int, num_new: int) -> NewTokens:
        """The new tokens of a layer, whose start is their index in the layer's slab."""
        return self.tokens


class ThinnedAttention(ChainAttention):
    """Attention of one rank's chunk under cache policies: deeper layers compute and send fewer tokens.

    A layer's tokens are contiguous in its slab: those that are left of earlier ranks' chunks, then this rank's. So the
    chain works as without policies, with different boundaries in every layer. All ranks, including the last, have a
    ring of slabs; after a layer's attention the policies drop tokens, and the kept ones are copied to memory of their
    own: all of them on the last rank, or with sharded decoding those of its chunk on each rank.

    Args:
        by_layer: the chunks of each layer.
        rank: the rank in the chain.
        kept: the KV cache for decoding, on a rank that decodes: of all tokens, or with sharded decoding of its own.
        reused: what the prompts reuse, if no policy drops tokens. The KV cache for decoding has it, too.
    """

    def __init__(
        self,
        run: ChainRun,
        by_layer: Sequence[ContextPartition],
        rank: int,
        kept: KeptCache | None,
        reused: ReusedKV | None = None,
    ) -> None:
        job, policies, chunk = run.job, run.job.own_policies, run.job.partition.chunk(rank)
        cache = run.cache if reused is None else reusing(run.cache.slabs, reused)
        super().__init__(run, cache, start=chunk.start, pads=job.batch.pads)
        self._by_layer, self._rank, self._slabs = by_layer, rank, run.cache
        self._texts = None if reused is None else reused.whole(job.batch.pads)
        self.kept = kept
        tokens, prompt_tokens = self.tokens, job.own_tokens
        if self._texts is not None:  # the same tokens, by their index in the whole text
            prompt_tokens = max(self._texts.lengths)
            tokens = NewTokens(prompt_tokens - len(chunk), [prompt_tokens - num for num in self._texts.lengths])
            if kept is not None:
                kept.gaps, kept.stored_parts = self._texts.gaps, self._texts.stored_parts()
        self._steps = PolicySteps(
            job.model,
            policies.of(is_last=run.is_last),
            tokens,
            prompt_tokens=prompt_tokens,
            room=policies.room(job.own_new_tokens),
            evicts=kept is not None,
            cache=self.kept,
            part=policies.part,
            await_device=run.await_device,
        )

    def tokens_in(self, layer: int, num_new: int) -> NewTokens:
        partition, chunks = self._by_layer[layer], self.run.job.partition
        own = partition.chunk(self._rank)
        assert num_new == len(own) or len(partition.chain) == 1, (layer, num_new)
        left = {rank: len(partition.chunk(rank)) for rank in partition.chain if rank < self._rank}
        left[self._rank] = num_new
        # Rows with fewer tokens than are left keep some of their padding, on the left.
        pads = [
            sum(max(0, num_left - num_tokens_of(pad, chunks.chunk(rank))) for rank, num_left in left.items())
            for pad in self.pads
        ]
        return NewTokens(own.start, pads)

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:
        self._steps.input_BCD = x_BCD

    def after(self, layer: int, store: LayerStore, seen: SeenKV, terms: AttentionTerms) -> None:
        if self.kept is None and not self._steps.policies:
            return
        kept = self._stored(layer, seen) if self._texts is None else self._whole(layer, self._texts)
        borrowed = kept.slab_TBKX if self._texts is None else None
        if self.kept is not None:
            self.kept.layers[layer] = kept
        kept = self._steps.run(layer, kept, seen, terms)
        if self.kept is not None:
            self.kept.layers[layer] = kept
            self.kept.own(layer, room=self._steps.room, is_borrowed=kept.slab_TBKX is borrowed)
            self.kept.note_peak()

    def _stored(self, layer: int, seen: SeenKV) -> KeptLayer:
        """The tokens in a layer's slab, in its memory."""
        num_new, device, slab = seen.q_BNCH.shape[2], seen.q_BNCH.device, self._slabs.layers[layer].slab
        placed = self.tokens_in(layer, num_new)
        end = placed.start + num_new
        is_part = self._steps.part is not None
        begin = placed.start if is_part else slab.first
        # This rank does not know which tokens of the prefix are left; any positions before its own serve.
        pads_B = row_values(placed.row_pads, device)
        before_nB = torch.arange(begin, placed.start, device=device)[:, None] - pads_B
        own_nB = self.tokens.positions_BC(num_new, device).T
        return KeptLayer(
            shape=self._slabs.slabs.shapes[layer],
            slab_TBKX=slab.tokens(begin, end),
            placed_TBK=torch.cat([before_nB, own_nB.expand(-1, len(self.pads))])[:, :, None].int(),
            pads=self.tokens.pads(num_new) if is_part else placed.row_pads,
            num_slots=end - begin,
            first=0 if is_part else begin,
            rotary=self._slabs.layers[layer].rotary,
        )

    def _whole(self, layer: int, texts: WholeTexts) -> KeptLayer:
        """The tokens that are reused and those in a layer's slab, in memory of their own."""
        job, room, num_tokens = self.run.job, self._steps.room, self._steps.prompt_tokens
        new_SBKX = self._slabs.layers[layer].slab.tokens(0, job.batch.num_tokens)
        pads = [num_tokens - num for num in texts.lengths]
        index_T = torch.arange(num_tokens + room, device=new_SBKX.device)
        return KeptLayer(
            shape=self._slabs.slabs.shapes[layer],
            slab_TBKX=texts.kv(layer, new_SBKX, room=room),
            placed_TBK=(index_T[:, None] - row_values(pads, new_SBKX.device))[:, :, None].int(),
            pads=pads,
            num_slots=num_tokens,
        )
