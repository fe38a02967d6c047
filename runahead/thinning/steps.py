"""Policies at work after a layer's attention: each looks at the layer, drops tokens of it and narrows what goes on."""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, m kept ones, H key dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from policies.base import LayerView, Phase, Policy
from runahead.attention.partial import AttentionTerms
from runahead.attention.probabilities import QuerySignals
from runahead.cache.base import SeenKV
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.cache.new_tokens import NewTokens


class PolicySteps:
    """The policies of one forward.

    Args:
        policies: at work one after the other.
        tokens: the forward's new tokens, which are narrowed.
        prompt_tokens: length of the padded prompt, for budgets that are shares of it.
        num_layers: of the model.
        room: tokens for which cutting back leaves room.
        cuts_back: False where nothing of the cache may go: in all chunks of a prompt but the last one, if the policies
            are to see it whole, and on ranks that do not decode.
        cache: takes in what stays, on a rank that decodes.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        tokens: NewTokens,
        *,
        prompt_tokens: int,
        num_layers: int,
        room: int = 0,
        cuts_back: bool = True,
        cache: KeptCache | None = None,
    ) -> None:
        self.policies, self.tokens, self.prompt_tokens = policies, tokens, prompt_tokens
        self.num_layers, self.room, self.cuts_back, self.cache = num_layers, room, cuts_back, cache

    def run(self, layer: int, kept: KeptLayer, seen: SeenKV, terms: AttentionTerms) -> None:
        """Let the policies decide about a layer, after the attention of the new tokens to it.

        A layer with a window of its own is left alone: it looks at recent tokens only, at their original distances.

        Args:
            kept: the layer as it is stored.
            seen: the same as the queries saw it.
        """
        if terms.rule is not None and not terms.rule.sees_everything:
            return
        positions_BC = self.tokens.positions_BC(seen.q_BNCH.shape[2], seen.q_BNCH.device)
        k_BKnH, v_BKnV = seen.read()
        before = kept.num_slots
        for policy in self.policies:
            slots_BKm = self._step(policy, layer, kept, seen.q_BNCH, k_BKnH, v_BKnV, terms, positions_BC)
            if slots_BKm is not None and policy is not self.policies[-1]:
                k_BKnH, v_BKnV = _at(slots_BKm, k_BKnH), _at(slots_BKm, v_BKnV)
        if self.cache is not None and self.cuts_back:
            was_cut = kept.num_slots < before
            self.cache.index(layer, kept, seen, positions_BC, terms, room=self.room, was_cut=was_cut)

    def _step(
        self,
        policy: Policy,
        layer: int,
        kept: KeptLayer,
        q_BNCH: Tensor,
        k_BKnH: Tensor,
        v_BKnV: Tensor,
        terms: AttentionTerms,
        positions_BC: Tensor,
    ) -> Tensor | None:
        """The slots that are kept, if not all are."""
        view = LayerView(
            layer=layer,
            num_layers=self.num_layers,
            phase=self.tokens.phase,
            num_new=q_BNCH.shape[2],
            chunk_tokens=self.tokens.chunk_tokens,
            new_positions_BC=positions_BC,
            prompt_tokens=self.prompt_tokens,
            pads=kept.pads,
            k_BKnH=k_BKnH,
            v_BKnV=v_BKnV,
            carried_BKn=kept.carried_BKn(),
            signals=QuerySignals(q_BNCH, k_BKnH, terms, queries_BC=positions_BC, keys_BKn=kept.positions_BKn()),
        )
        carried_BKn = policy.carry(view)
        if carried_BKn is not None:
            kept.carry(carried_BKn)
            view = replace(view, carried_BKn=carried_BKn)
        slots_BKm = policy.keep(view) if self.cuts_back else None
        selected_Bc = policy.narrow(view) if policy.narrows and self.tokens.phase is Phase.prefill else None
        if slots_BKm is not None:
            kept.keep(slots_BKm, room=self.room)
        if selected_Bc is not None:
            self.tokens.narrow(selected_Bc)
        return slots_BKm


def _at(slots_BKm: Tensor, x_BKnX: Tensor) -> Tensor:
    """What is in these slots, (B, K, m, X). Slots may be the same for all heads."""
    return x_BKnX.take_along_dim(slots_BKm[..., None], dim=2)
