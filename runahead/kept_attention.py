"""Causal attention over K,V that a cache policy thins out: store, attend, then let the policy cut back."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from policies.base import LayerView, Phase, Policy
from runahead.attention import AttentionTerms
from runahead.causal_attention import CausalAttention
from runahead.kept_cache import KeptCache, KeptLayer
from runahead.new_tokens import NewTokens
from runahead.signals import QuerySignals


class KeptAttention(CausalAttention):
    """Attention of the tokens [start, start + C) of a left-padded batch to what is kept of all before them.

    Layers with a window of their own are left alone: they look at recent tokens only, at their original distances.

    Args:
        cache: what is kept; receives the new K,V.
        steps: policies that cut back one after the other.
        start: index of the first new token in the padded batch.
        pads: left padding of every row.
        phase: of the new tokens.
        prompt_tokens: length of the padded prompt, for budgets that are shares of it.
        room: tokens for which cutting back leaves room.
        cuts_back: False for all chunks of a prompt but the last one, if the policies are to see it whole.
    """

    def __init__(
        self,
        kept: KeptCache,
        steps: list[Policy],
        *,
        start: int,
        pads: list[int],
        phase: Phase,
        prompt_tokens: int,
        room: int = 0,
        cuts_back: bool = True,
    ) -> None:
        self.kept, self.steps, self.phase, self.prompt_tokens = kept, steps, phase, prompt_tokens
        self.room, self.cuts_back = room, cuts_back
        self.new_tokens = NewTokens(start, pads)

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        kept, num_new = self.kept.layers[layer], q_BNCH.shape[2]
        queries_BC = self.new_tokens.positions_BC(num_new, q_BNCH.device)
        start = kept.end
        kept.append(k_BKCH, v_BKCV, queries_BC, self.new_tokens.pads(num_new))
        # From here on positions are those of slots, which are in causal order.
        self.start, self.pads = start, kept.pads
        self.kept.peak_bytes = max(self.kept.peak_bytes, self.kept.num_bytes)
        out_BNCV = self.attend_to_slab(kept.slab(), q_BNCH, terms)
        if terms.rule is None or terms.rule.sees_everything:
            for policy in self.steps:
                signals = QuerySignals(
                    q_BNCH, kept.keys_BKnH(), terms, queries_BC=queries_BC, keys_BKn=kept.positions_BKn()
                )
                self._cut_back(policy, layer, kept, queries_BC, signals)
        return out_BNCV

    def _cut_back(self, policy: Policy, layer: int, kept: KeptLayer, queries_BC: Tensor, signals: QuerySignals) -> None:
        k_BKnH, v_BKnV = kept.slab().read(0, kept.end)
        view = LayerView(
            layer=layer,
            num_layers=len(self.kept.layers),
            phase=self.phase,
            num_new=queries_BC.shape[1],
            chunk_tokens=self.new_tokens.chunk_tokens,
            new_positions_BC=queries_BC,
            prompt_tokens=self.prompt_tokens,
            pads=kept.pads,
            k_BKnH=k_BKnH,
            v_BKnV=v_BKnV,
            carried_BKn=kept.carried_BKn(),
            signals=signals,
        )
        carried_BKn = policy.carry(view)
        if carried_BKn is not None:
            kept.carry(carried_BKn)
            view = replace(view, carried_BKn=carried_BKn)
        slots_BKm = policy.keep(view) if self.cuts_back else None
        selected_Bc = policy.narrow(view) if policy.narrows and self.phase is Phase.prefill else None
        if slots_BKm is not None:
            kept.cut_back(slots_BKm, room=self.room)
        if selected_Bc is not None:
            self.new_tokens.narrow(selected_Bc)
