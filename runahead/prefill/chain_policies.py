"""Cache policies of one rank in a chain: deeper layers compute and send fewer tokens, and what is kept is copied."""

# Legend: B batch, C chunk, n tokens in the slab.

from __future__ import annotations

from collections.abc import Sequence

import torch

from policies.row_values import row_values
from runahead.cache.attention import LayerCall, LayerHook
from runahead.cache.kept import KeptLayer
from runahead.cache.kept_cache import KeptCache
from runahead.cache.new_tokens import NewTokens, num_tokens_of
from runahead.context import ContextPartition
from runahead.prefill.stage_run import StageRun
from runahead.reuse.reused_kv import ReusedKV
from runahead.thinning.steps import PolicySteps


class ChainPolicies(LayerHook):
    """Cache policies after each layer of one rank's chunk.

    A layer's tokens are contiguous in its slab: those that are left of earlier ranks' chunks, then this rank's. So the
    chain works as without policies, with different boundaries in every layer. All ranks, including the last, have a
    ring of slabs; after a layer's attention the policies drop tokens, and the kept ones are copied to memory of their
    own: all of them on the last rank, or with sharded decoding those of its chunk on each rank.

    Args:
        run: this rank's part of the prefill.
        tokens: the new tokens of its chunk, which policies may narrow.
        by_layer: the chunks of each layer.
        rank: the rank in the chain.
        kept: the KV cache for decoding, on a rank that decodes: of all tokens, or with sharded decoding of its own.
        reused: what the prompts reuse, if no policy drops tokens. The KV cache for decoding has it, too.
    """

    def __init__(
        self,
        run: StageRun,
        tokens: NewTokens,
        by_layer: Sequence[ContextPartition],
        rank: int,
        kept: KeptCache | None,
        reused: ReusedKV | None = None,
    ) -> None:
        job, policies, chunk = run.job, run.job.own_policies, run.job.partition.chunk(rank)
        self._run, self._tokens = run, tokens
        self._by_layer, self._rank = by_layer, rank
        self._texts = None if reused is None else reused.whole(job.batch.pads)
        self.kept = kept
        prompt_tokens = job.own_tokens
        if self._texts is not None:  # the same tokens, by their index in the whole text
            prompt_tokens, tokens = max(self._texts.lengths), self._texts.last_tokens(len(chunk))
            if kept is not None:
                kept.gaps, kept.stored_parts = self._texts.gaps, self._texts.stored_parts()
        self._steps = PolicySteps(
            job.model,
            policies.on_rank(is_last=run.is_last),
            tokens,
            prompt_tokens=prompt_tokens,
            room=policies.room(job.own_new_tokens),
            evicts=kept is not None,
            cache=self.kept,
            part=policies.part,
            await_device=run.await_device,
        )

    def before_save(self, call: LayerCall) -> None:
        if self._texts is not None:
            self._steps.tokens.leave_as(self._tokens)
        if not self._run.job.policies.narrows:  # a token's index is its place in every layer
            return
        partition, chunks, num_new = self._by_layer[call.layer], self._run.job.partition, call.q_BNCH.shape[2]
        own = partition.chunk(self._rank)
        assert num_new == len(own) or len(partition.chain) == 1, (call.layer, num_new)
        left = {rank: len(partition.chunk(rank)) for rank in partition.chain if rank < self._rank}
        left[self._rank] = num_new
        # Rows with fewer tokens than are left keep some of their padding, on the left.
        pads = [
            sum(max(0, num_left - num_tokens_of(pad, chunks.chunk(rank))) for rank, num_left in left.items())
            for pad in self._tokens.row_pads
        ]
        call.tokens = NewTokens(own.start, pads)

    def closed(self, call: LayerCall) -> None:
        if self.kept is None and not self._steps.policies:
            return
        layer, texts, cache = call.layer, self._texts, self._run.cache
        self._steps.input_BCD = call.input_BCD
        if texts is None:
            self._steps.store(layer, self._stored(call), call.seen, call.terms, is_borrowed=True)
            return
        new_SBKX = cache.layers[layer].slab.tokens(0, self._run.job.batch.num_tokens)
        whole = texts.layer(layer, cache.slabs.shapes[layer], new_SBKX, room=self._steps.room)
        self._steps.store(layer, whole, call.seen, call.terms)

    def _stored(self, call: LayerCall) -> KeptLayer:
        """The tokens in a layer's slab, in its memory."""
        stored, placed, num_new = self._run.cache.layers[call.layer], call.tokens, call.q_BNCH.shape[2]
        device, slab, end = call.q_BNCH.device, stored.slab, placed.start + num_new
        is_part = self._steps.part is not None
        begin = placed.start if is_part else slab.first
        # This rank does not know which tokens of the prefix are left; any positions before its own serve.
        pads_B = row_values(placed.row_pads, device)
        before_nB = torch.arange(begin, placed.start, device=device)[:, None] - pads_B
        own_nB = self._tokens.positions_BC(num_new, device).T
        return KeptLayer(
            shape=self._run.cache.slabs.shapes[call.layer],
            slab_TBKX=slab.tokens(begin, end),
            placed_TBK=torch.cat([before_nB, own_nB.expand(-1, len(placed.row_pads))])[:, :, None].int(),
            pads=self._tokens.pads(num_new) if is_part else placed.row_pads,
            num_slots=end - begin,
            first=0 if is_part else begin,
            rotary=stored.rotary,
        )
