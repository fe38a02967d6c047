"""Cache policies after a layer's attention: each scores the layer's tokens, drops some and narrows later layers."""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, m kept ones, H key dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from policies.base import LayerView, Phase, Policy, PromptPart
from runahead.attention.partial import AttentionTerms
from runahead.attention.probabilities import QuerySignals
from runahead.attention.query_moments import QueryMoments
from runahead.cache.base import SeenKV
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.cache.new_tokens import NewTokens, row_values
from runahead.model.model import Model


class PolicySteps:
    """The cache policies of one forward.

    Args:
        model: the model.
        policies: run one after the other.
        tokens: the forward's new tokens, which policies may narrow.
        prompt_tokens: length of the padded prompt, or of this rank's part, for budgets that are shares of it.
        room: new tokens for which a layer has room after tokens were dropped.
        evicts: False if no token may be dropped from the cache: on ranks that do not decode, and in all chunks of a
            prompt but the last one if the policies need to see the whole prompt.
        cache: updates its indices after each layer, on a rank that decodes.
        part: as in `LayerView`.
    """

    def __init__(
        self,
        model: Model,
        policies: Sequence[Policy],
        tokens: NewTokens,
        *,
        prompt_tokens: int,
        room: int = 0,
        evicts: bool = True,
        cache: KeptCache | None = None,
        part: PromptPart | None = None,
    ) -> None:
        self.policies, self.tokens, self.prompt_tokens = policies, tokens, prompt_tokens
        self.room, self.evicts, self.cache, self.part = room, evicts, cache, part
        self._model = model
        asked = [policy.queries_from for policy in policies if policy.queries_from is not None]
        self._queries_from = min(asked, default=None)
        self._rotations = model.rotations if asked else []

    def run(self, layer: int, kept: KeptLayer, seen: SeenKV, terms: AttentionTerms) -> None:
        """Run the policies on a layer, after the new tokens' attention to it.

        A layer with a sliding window is skipped: it attends to recent tokens only, at their original distances.

        Args:
            kept: the layer as it is stored.
            seen: the layer as the queries saw it.
        """
        if terms.rule is not None and not terms.rule.sees_everything:
            return
        positions_BC = self.tokens.positions_BC(seen.q_BNCH.shape[2], seen.q_BNCH.device)
        before, q_BNCH, (k_BKnH, v_BKnV) = kept.num_slots, seen.q_BNCH, seen.read()
        lse_BNC = None
        if self.part is not None:  # the queries have seen tokens of other ranks, too, before these
            k_BKnH, v_BKnV = (x[:, :, x.shape[2] - before :] for x in (k_BKnH, v_BKnV))
            lse_BNC = seen.lse() if self.policies else None
        ahead = self._count_queries(layer, kept, q_BNCH, positions_BC)
        for policy in self.policies:
            view = LayerView(
                layer=layer,
                num_layers=self._model.num_layers,
                phase=self.tokens.phase,
                num_new=q_BNCH.shape[2],
                chunk_tokens=self.tokens.chunk_tokens,
                new_positions_BC=positions_BC,
                prompt_tokens=self.prompt_tokens,
                pads=kept.pads,
                k_BKnH=k_BKnH,
                v_BKnV=v_BKnV,
                carried_BKn=kept.carried_BKn(),
                signals=QuerySignals(
                    q_BNCH,
                    k_BKnH,
                    terms,
                    queries_BC=positions_BC,
                    keys_BKn=kept.positions_BKn(),
                    lse_BNC=lse_BNC,
                    ahead=ahead,
                ),
                mean_over_shares=self._model.mean_over_shards,
                part=self.part,
            )
            slots_BKm = self._step(policy, view, kept)
            if slots_BKm is not None and policy is not self.policies[-1]:
                k_BKnH, v_BKnV = (x.take_along_dim(slots_BKm[..., None], dim=2) for x in (k_BKnH, v_BKnV))
        if self.cache is not None and self.evicts:
            was_cut = kept.num_slots < before
            self.cache.index(layer, seen, positions_BC, terms, room=self.room, was_cut=was_cut)

    def _count_queries(
        self, layer: int, kept: KeptLayer, q_BNCH: Tensor, positions_BC: Tensor
    ) -> Callable[[int], tuple[Tensor, Tensor]] | None:
        """Add the new queries to those that the layer has counted, if a policy asks for the queries to come.

        Returns:
            number of next positions -> mean and covariance of the queries there.
        """
        if self._queries_from is None:
            return None
        rotary, turned_BC = self._rotations[layer], positions_BC
        if kept.rotary is not None:  # queries are rotated to their slots
            slots_C = torch.arange(kept.end - q_BNCH.shape[2], kept.end, device=q_BNCH.device)
            turned_BC = slots_C - row_values(kept.pads, q_BNCH.device)[:, None]
        counts_BC = positions_BC >= self._queries_from  # padding is below 0
        moments = QueryMoments.of(q_BNCH, rotary, positions_BC=turned_BC, counts_BC=counts_BC)
        kept.queries = moments if kept.queries is None else kept.queries.merged(moments)
        next_B = turned_BC[:, -1] + 1
        if self.part is not None and self.tokens.phase is Phase.prefill:
            next_B = next_B + self.part.num_after
        return partial(kept.queries.ahead, rotary, next_B)

    def _step(self, policy: Policy, view: LayerView, kept: KeptLayer) -> Tensor | None:
        """Run one policy. Returns the slots (B, K, m) or (B, 1, m) that it kept, None if it kept all."""
        carried_BKn = policy.carry(view)
        if carried_BKn is not None:
            kept.carry(carried_BKn)
            view = replace(view, carried_BKn=carried_BKn)
        slots_BKm = policy.keep(view) if self.evicts else None
        selected_Bc = policy.narrow(view) if policy.narrows and self.tokens.phase is Phase.prefill else None
        if slots_BKm is not None:
            kept.keep(slots_BKm, room=self.room)
        if selected_Bc is not None:
            self.tokens.narrow(selected_Bc)
        return slots_BKm
