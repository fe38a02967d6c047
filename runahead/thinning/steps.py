"""Cache policies after a layer's attention: each scores the layer's tokens, drops some and narrows later layers."""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, m kept ones, H key dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from policies.base import Policy, marked_slots
from policies.layer_view import LayerView, Phase, PromptPart
from policies.retriever import Retriever
from policies.row_values import row_values
from runahead.attention.answers import Answers
from runahead.attention.marked import marked_keys
from runahead.attention.op import nothing
from runahead.attention.partial import AttentionTerms
from runahead.attention.probabilities import QuerySignals
from runahead.attention.query_moments import QueryMoments
from runahead.cache.base import SeenKV
from runahead.cache.kept import KeptLayer
from runahead.cache.kept_cache import KeptCache
from runahead.cache.new_tokens import NewTokens
from runahead.model.layers.output_projection import projected_lengths
from runahead.model.model import Model
from runahead.thinning.cutting import cut_back
from runahead.thinning.replay import carried_scores, cut_layers


class PolicySteps:
    """The cache policies of one forward.

    Args:
        model: the model.
        policies: run one after the other; those that do not decide on generated tokens are left out for these.
        tokens: the forward's new tokens, which policies may narrow.
        prompt_tokens: length of the padded prompt, or of this rank's part, for budgets that are shares of it.
        room: new tokens for which a layer has room after tokens were dropped.
        evicts: False if no token may be dropped from the cache: on ranks that do not decode, and in all chunks of a
            prompt but the last one if the policies need to see the whole prompt.
        cache: updates its indices after each layer, on a rank that decodes.
        part: as in `LayerView`.
        await_device: called before the host asks the device for a value.

    Attributes:
        input_BCD: as in `LayerView`, of the layer that runs next; set before it does.
        answers: signals of the layer that runs next, if other policies may have asked for the same; set before it does.
    """

    input_BCD: Tensor | None = None
    answers: Answers | None = None

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
        await_device: Callable[[], None] = nothing,
    ) -> None:
        is_given = tokens.phase is Phase.prefill
        # What retrieves drops and scores nothing: the cache has its index.
        chosen = [policy for policy in policies if not isinstance(policy, Retriever)]
        self.policies = [policy for policy in chosen if is_given or policy.while_decoding or policy.carries_generated]
        self.tokens, self.prompt_tokens = tokens, prompt_tokens
        self.room, self.evicts, self.cache, self.part = room, evicts, cache, part
        self._model, self._await_device = model, await_device
        self._index_asks = any(isinstance(policy, Retriever) and policy.index_asks_device for policy in policies)
        self._counts_from = {each.queries_from for each in self.policies if each.queries_from is not None}
        self._rotations = model.rotations if self._counts_from else []
        projects = any(policy.needs_output_projection for policy in self.policies)
        self._projections = model.output_projections if projects else None
        self._kinds_V = model.token_kinds if any(policy.needs_token_kinds for policy in self.policies) else None
        if any(policy.needs_attention_input for policy in self.policies):
            _ = model.attention_input_dims  # from then on forwards show them

    def run(self, layer: int, kept: KeptLayer, seen: SeenKV, terms: AttentionTerms) -> KeptLayer:
        """Run the policies on a layer, after the new tokens' attention to it.

        A layer with a sliding window is skipped: it attends to recent tokens only, at their original distances.

        Args:
            kept: the layer as it is stored.
            seen: the layer as the queries saw it.

        Returns:
            the layer as it is stored then: another one where its heads keep different numbers of tokens.
        """
        if terms.rule is not None:
            return kept
        positions_BC = self.tokens.positions_BC(seen.q_BNCH.shape[2], seen.q_BNCH.device)
        before = kept.num_slots
        if self.policies and not self._rests(layer, kept):
            if kept.on_host:  # what a turn retrieved from
                assert self.cache is not None
                kept = kept.to_device()
                self.cache.put(layer, kept)
            kept = self._run_all(layer, kept, seen, terms, positions_BC)
            kept = self._cascade(layer, kept)
        if self.cache is not None and (self.evicts or self.cache.indexes_all):
            was_cut = kept.num_slots < before
            if self._index_asks:
                self._await_device()
            start = self.tokens.start
            self.cache.index(layer, seen, positions_BC, terms, start=start, room=self.room, was_cut=was_cut)
        elif self.cache is not None:
            chunk = range(self.tokens.start, self.tokens.start + self.tokens.chunk_tokens)
            self.cache.observe(layer, seen.q_BNCH, positions_BC, chunk)
        return kept

    def store(
        self, layer: int, kept: KeptLayer, seen: SeenKV, terms: AttentionTerms, *, is_borrowed: bool = False
    ) -> None:
        """Run the policies on a layer of a prompt, and store in the cache, if there is one, what they leave of it.

        Args:
            is_borrowed: whether the layer is in memory of others.
        """
        if self.cache is not None:
            self.cache.layers[layer] = kept
        slab_TBKX, kept = kept.slab_TBKX, self.run(layer, kept, seen, terms)
        if self.cache is not None:
            self.cache.layers[layer] = kept
            self.cache.own(layer, room=self.room, is_borrowed=is_borrowed and kept.slab_TBKX is slab_TBKX)
            self.cache.note_peak()

    def _cascade(self, layer: int, kept: KeptLayer) -> KeptLayer:
        """Let a policy that cascades cut back this layer of a prompt, and those before it once more."""
        policy = next((each for each in self.policies if each.cascades and each.drops_of(self.prompt_tokens)), None)
        if policy is None or not self.evicts or self.tokens.phase is not Phase.prefill:
            return kept
        assert self.cache is not None, "a rank that drops tokens has a cache"
        self.cache.put(layer, kept)
        self._await_device()
        with self._model.ranges("policy", policy.label):
            scores = carried_scores(self.cache.layers[: layer + 1], policy)
            cut_layers(self._model, policy, self.cache, scores, self.prompt_tokens, room=self.room)
        return self.cache.layers[layer]

    def _decides(self, policy: Policy) -> bool:
        """Whether a policy decides on these tokens, rather than only carries something of them."""
        return self.tokens.phase is Phase.prefill or policy.while_decoding

    def _rests(self, layer: int, kept: KeptLayer) -> bool:
        """Whether no policy has anything to do, so that the keys of a ragged layer, say, need not be copied."""
        if self.tokens.phase is Phase.prefill:
            return False
        tokens_BK = kept.tokens_BK
        return all(policy.rests(layer, tokens_BK, self.prompt_tokens) for policy in self.policies)

    def _run_all(
        self, layer: int, kept: KeptLayer, seen: SeenKV, terms: AttentionTerms, positions_BC: Tensor
    ) -> KeptLayer:
        if seen.of_all is not None:
            seen = seen.of_all()
        q_BNCH, (k_BKnH, v_BKnV) = seen.q_BNCH, self._keys_and_values(kept, seen)
        lse_BNC = self._lse_of(seen)
        ahead = self._count_queries(layer, kept, q_BNCH, positions_BC)
        biased_BKn = None
        if kept.rotary is not None and terms.key_bias is not None:  # by their places among the tokens that are left
            biased_BKn = (kept.positions_BKn() >= 0).cumsum(dim=-1) - 1
        new_kinds_BC = self._new_kinds()  # of these tokens, before a policy narrows those of the next layer
        for policy in self.policies:
            if not kept.num_slots:  # a step before has dropped all that is here
                break
            positions_BKn = kept.positions_BKn()
            signals = QuerySignals(
                q_BNCH,
                k_BKnH,
                terms,
                queries_BC=positions_BC,
                keys_BKn=positions_BKn,
                biased_BKn=biased_BKn,
                lse_BNC=lse_BNC,
                ahead=None if policy.queries_from is None else ahead[policy.queries_from],
                project=self._projecting(layer, v_BKnV, q_BNCH.shape[1]),
                layer=layer,
                first_head=self._model.shard_number * q_BNCH.shape[1],
                # A later policy sees what the first one kept.
                answers=self.answers if policy is self.policies[0] else None,
            )
            for each in seen.readers:
                signals.add_reader(each.layer, each.seen.q_BNCH, each.terms, lse_BNC=self._lse_of(each.seen))
            view = LayerView(
                layer=layer,
                num_layers=self._model.num_layers,
                phase=self.tokens.phase,
                num_new=q_BNCH.shape[2],
                chunk_tokens=self.tokens.chunk_tokens,
                new_positions_BC=positions_BC,
                prompt_tokens=self.prompt_tokens,
                pads=kept.pads,
                head_pads=kept.head_pads,
                alike=kept.alike,
                positions_BKn=positions_BKn,
                k_BKnH=k_BKnH,
                v_BKnV=v_BKnV,
                carried_BKn=kept.carried_BKn(policy.state_key),
                signals=signals,
                mean_over_shares=self._model.mean_over_shards,
                joined_over_shares=self._model.joined_over_shards,
                share=self._model.shard_number,
                num_shares=self._model.num_shards,
                part=self.part,
                num_generated=self._num_generated,
                new_kinds_BC=new_kinds_BC,
                input_BCD=self.input_BCD,
                unseen_BKn=self._unseen(k_BKnH, positions_BKn, positions_BC, terms),
            )
            with self._model.ranges("policy", policy.label):
                slots_BKm, kept = self._step(policy, view, kept)
            if slots_BKm is not None and policy is not self.policies[-1]:
                if k_BKnH.is_meta:
                    slots_BKm = slots_BKm.to("meta")
                at_BKm1 = slots_BKm.clamp_min(0)[..., None]  # padding of a head may have any key
                k_BKnH, v_BKnV = (x.take_along_dim(at_BKm1, dim=2) for x in (k_BKnH, v_BKnV))
                if biased_BKn is not None and not k_BKnH.is_meta:
                    biased_BKn = biased_BKn.take_along_dim(at_BKm1[..., 0], dim=2)
        return kept

    @staticmethod
    def _unseen(k_BKnH: Tensor, positions_BKn: Tensor, positions_BC: Tensor, terms: AttentionTerms) -> Tensor | None:
        """Whether each slot holds a marked token that queries after the new tokens do not see; see `LayerView`."""
        if terms.marked_window is None:
            return None
        is_past_BKn = positions_BKn + terms.marked_window <= positions_BC[:, None, -1:] + 1
        return marked_keys(k_BKnH, positions_BKn) & is_past_BKn

    def _lse_of(self, seen: SeenKV) -> Tensor | None:
        """Log-sum-exp (B, N, C) of the queries' scores, if they saw tokens of other ranks."""
        return None if self.part is None else seen.lse()

    def _keys_and_values(self, kept: KeptLayer, seen: SeenKV) -> tuple[Tensor, Tensor]:
        """Keys (B, K, n, H) and values (B, K, n, V) of a layer's slots; their shapes alone if no policy needs more."""
        if any(policy.needs_keys and self._decides(policy) for policy in self.policies):
            k_BKnH, v_BKnV = kept.read() if seen.whole is None else seen.read()
            if self.part is not None:  # the queries have seen tokens of other ranks, too, before these
                k_BKnH, v_BKnV = (x[:, :, x.shape[2] - kept.num_slots :] for x in (k_BKnH, v_BKnV))
            return k_BKnH, v_BKnV
        slots, shape = (len(kept.pads), kept.shape.num_kv_heads, kept.num_slots), kept.shape
        k_BKnH, v_BKnV = (torch.empty(*slots, dim, device="meta") for dim in (shape.key_dim, shape.value_dim))
        return k_BKnH, v_BKnV

    def _projecting(self, layer: int, v_BKnV: Tensor, num_heads: int) -> Callable[[int], Tensor] | None:
        if self._projections is None:
            return None
        return partial(projected_lengths, v_BKnV, self._projections[layer], num_heads)

    def _new_kinds(self) -> Tensor | None:
        if self._kinds_V is None:
            return None
        ids_BC, left_Bc = self.tokens.ids_BC, self.tokens.left_Bc
        assert ids_BC is not None, "attention of a forward sees its ids"
        return self._kinds_V[ids_BC if left_Bc is None else ids_BC.gather(1, left_Bc)]

    @property
    def _num_generated(self) -> int:
        """Number of tokens generated since the prompt, with this one; 0 in a prompt."""
        if self.tokens.phase is Phase.prefill:
            return 0
        return self.tokens.start + 1 - (self.prompt_tokens if self.part is None else self.part.num_tokens)

    def _count_queries(
        self, layer: int, kept: KeptLayer, q_BNCH: Tensor, positions_BC: Tensor
    ) -> dict[int, Callable[[int], tuple[Tensor, Tensor]]]:
        """Add the new queries to those that the layer has counted, if policies ask for the queries to come.

        Returns:
            by the first position that counts: number of next positions -> mean and covariance of the queries there.
        """
        if not self._counts_from:
            return {}
        rotary, turned_BC = self._rotations[layer], positions_BC
        if kept.rotary is not None:  # queries are rotated to their slots
            slots_C = torch.arange(kept.end - q_BNCH.shape[2], kept.end, device=q_BNCH.device)
            turned_BC = slots_C - row_values(kept.pads, q_BNCH.device)[:, None]
        new = {  # padding is below 0
            first: QueryMoments.from_queries(q_BNCH, rotary, positions_BC=turned_BC, counts_BC=positions_BC >= first)
            for first in self._counts_from
        }
        before = kept.queries
        kept.queries = {first: before[first].merged(each) if first in before else each for first, each in new.items()}
        next_B = turned_BC[:, -1] + 1
        if self.part is not None and self.tokens.phase is Phase.prefill:
            next_B = next_B + self.part.num_after
        return {first: partial(moments.ahead, rotary, next_B) for first, moments in kept.queries.items()}

    def _step(self, policy: Policy, view: LayerView, kept: KeptLayer) -> tuple[Tensor | None, KeptLayer]:
        """Run one policy. Returns the slots (B, K, m) or (B, 1, m) that it kept, None if it kept all, and the layer."""
        carried_BKn = policy.carry(view)
        if carried_BKn is not None:
            kept.carry(carried_BKn, policy.state_key)
            view = replace(view, carried_BKn=carried_BKn)
        is_ragged = view.head_pads is not None or (kept.few is not None and kept.few.becomes_ragged)
        slots_BKm = None
        if self.evicts and self._decides(policy):
            if is_ragged or policy.keeps_ragged:  # the host asks how many tokens each head keeps
                self._await_device()
            slots_BKm = policy.keep(view)
        selected_Bc = policy.narrow(view) if policy.narrows and self.tokens.phase is Phase.prefill else None
        if slots_BKm is not None:
            # A ragged layer stores no padding, so the next step must not be given slots of padding either.
            tokens_B = policy.tokens_after(view)
            if is_ragged and not policy.keeps_ragged:
                slots_BKm = _without_padding(slots_BKm, view)
            if is_ragged or policy.keeps_ragged:
                kept = cut_back(kept, slots_BKm, room=self.room, tokens_B=tokens_B, compensates=policy.compensates)
            else:
                kept = kept.keep(slots_BKm, room=self.room, tokens_B=tokens_B)
            kept.alike = kept.alike and policy.chooses_alike
        if selected_Bc is not None:
            self.tokens.narrow(selected_Bc)
        return slots_BKm, kept


def _without_padding(slots_BKm: Tensor, view: LayerView) -> Tensor:
    """Slots of which a policy chose equally many in each head, as `Policy.keep` returns them: -1 for padding, first."""
    is_token_BKn = view.is_token_BKn().expand(-1, view.num_kv_heads, -1)
    chosen_BKp = functional.pad(torch.zeros_like(is_token_BKn), (1, 0))  # the first place is for -1
    chosen_BKp.scatter_(2, slots_BKm.expand(-1, view.num_kv_heads, -1) + 1, True)
    return marked_slots(chosen_BKp[..., 1:] & is_token_BKn)
