"""A draft's look ahead: it generates some tokens after the prompts, and what these attend to is noted."""

# Legend: B batch, S tokens of the padded prompts, N query heads, n stored tokens.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from policies.layer_view import Phase
from runahead.attention.op import nothing
from runahead.attention.probabilities import QuerySignals
from runahead.cache.attention import CausalAttention, LayerCall, LayerHook
from runahead.cache.base import KVStore
from runahead.decoding.forward import logits_of
from runahead.model.model import Model
from runahead.prompt_draft.choice import smoothed


def scores(
    model: Model,
    cache: KVStore,
    logits_BV: Tensor,
    *,
    num_tokens: int,
    pads: list[int],
    num_ahead: int,
    on_layer: Callable[[], None] = nothing,
) -> list[Tensor]:
    """Score (n) of each prompt's tokens, by the next tokens that a model generates.

    Args:
        cache: of the prompts, with room for these.
        logits_BV: after the prompts.
        num_tokens: of the padded prompts.
        pads: left padding of each row.
        num_ahead: number of tokens that are generated, greedily.
    """
    total_BS = torch.zeros(len(pads), num_tokens, device=model.device)
    for index in range(num_tokens, num_tokens + num_ahead):
        seen, is_last = Seen(num_tokens, pads), index + 1 == num_tokens + num_ahead
        attention = CausalAttention(
            cache,
            start=index,
            pads=pads,
            phase=Phase.decode,
            hooks=[seen],
            ends=model.last_attention if is_last else None,  # nobody needs its logits
            on_layer=on_layer,
        )
        logits_BV = logits_of(model, logits_BV.argmax(dim=-1)[:, None], attention)
        assert seen.highest_BS is not None, "the model has layers that see the whole prompt"
        total_BS += seen.highest_BS
    means_BS = (total_BS / num_ahead).cpu()
    return [means_S[pad:] for means_S, pad in zip(means_BS, pads, strict=True)]


class Seen(LayerHook):
    """Notes the largest attention probability that any head of any layer gives a token, smoothed.

    Layers with sliding windows see recent tokens alone, and do not count.

    Attributes:
        highest_BS: of the tokens of the prompts; None before the first layer.
    """

    def __init__(self, num_tokens: int, pads: list[int]) -> None:
        self._num_tokens, self._pads = num_tokens, pads
        self.highest_BS: Tensor | None = None

    def closed(self, call: LayerCall) -> None:
        if call.terms.rule is not None:
            return
        k_BKnH, _ = call.seen.read()
        num_stored, device = k_BKnH.shape[2], k_BKnH.device
        pads_B1 = torch.tensor(self._pads, device=device)[:, None]
        positions_Bn = torch.arange(num_stored, device=device) - pads_B1
        signals = QuerySignals(
            call.q_BNCH,
            k_BKnH,
            call.terms,
            queries_BC=positions_Bn[:, num_stored - call.q_BNCH.shape[2] :],
            keys_BKn=positions_Bn[:, None],
            layer=call.layer,
        )
        probabilities_BNS = signals.votes(1)[..., : self._num_tokens]
        highest_BS = torch.zeros(len(self._pads), self._num_tokens, device=device)
        for row, pad in enumerate(self._pads):
            highest_BS[row, pad:] = smoothed(probabilities_BNS[row, :, pad:]).amax(dim=0)
        self.highest_BS = highest_BS if self.highest_BS is None else torch.maximum(self.highest_BS, highest_BS)
