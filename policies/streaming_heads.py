"""Retrieval heads keep all tokens, streaming heads the first and last ones: what methods have in common that tell them.

A head that finds its tokens anywhere in a text needs all of them. A head that attends to the first tokens, whatever
these are, and to the newest ones does not miss the others. Which is which is a property of a model.
"""

# Legend: B batch, K kv heads, n stored slots, m kept slots of the longest head.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from policies.base import ModelFacts, Policy, StreamedHeads, StreamedShare
from policies.kept_slots import best_slots
from policies.layer_view import LayerView, Phase, PromptPart
from policies.options import require_least
from policies.row_values import row_values


@dataclass(kw_only=True)
class StreamingHeads(Policy, ABC):
    """Base of policies whose KV heads keep all tokens, or the first and last ones alone.

    Attributes:
        heads: file or folder that says which heads of the model retrieve.
        evict_every: while decoding, number of tokens by which streaming heads may exceed what they keep before a layer
            is cut back, since cutting back copies what is kept.
    """

    keeps_ragged: ClassVar[bool] = True
    made_by: ClassVar[str]
    """Description of what `heads` names, for messages."""

    heads: str | None = None
    evict_every: int = 64
    _retrieving: list[list[bool]] | None = field(default=None, init=False, repr=False, compare=False)
    _part: PromptPart | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_least(self, evict_every=1)

    @property
    def last_queries(self) -> int:
        return 0

    @abstractmethod
    def found_in(self, heads: str, model: ModelFacts) -> list[list[bool]]:
        """Whether each KV head of each layer is a retrieval head, those of all shares. Raises: ValueError."""

    @abstractmethod
    def first_and_last(self, prompt_tokens: int) -> tuple[int, int]:
        """Number of first and of last tokens that streaming heads keep of a prompt of this length and what follows."""

    @property
    def reads(self) -> str | None:
        return self.heads

    def require_file(self) -> None:
        if self.heads is None:
            raise ValueError(
                f"policy {self.label} needs to know which heads of the model retrieve; give "
                f"policy.heads=<{self.made_by}>"
            )

    def require(self, model: ModelFacts) -> None:
        self.require_file()
        assert self.heads is not None
        found = self.found_in(self.heads, model)
        self._retrieving = [heads[model.own_heads(layer)] for layer, heads in enumerate(found)]

    def of_part(self, part: PromptPart) -> Self:
        other = copy(self)
        other.evict_every, other._part = part.share_of(self.evict_every), part
        return other

    def retrieving(self, layer: int, num_kv_heads: int) -> list[bool]:
        """Whether each KV head of a layer is a retrieval head."""
        assert self._retrieving is not None and len(self._retrieving[layer]) == num_kv_heads, "require() comes first"
        return self._retrieving[layer]

    @property
    def streams(self) -> bool:
        return not self.compensates

    def streamed_heads(self, prompt_tokens: int) -> StreamedHeads:
        assert self._retrieving is not None, "require() comes first"
        sinks, recent = self.first_and_last(prompt_tokens)
        by_layer = [[not retrieves for retrieves in heads] for heads in self._retrieving]
        return StreamedHeads(by_layer=by_layer, sinks=sinks, recent=recent)

    def expected_share(self, num_heads: int | None) -> float | None:
        """Share of a model's KV heads that stream, whichever these are; None if the options do not say it.

        Args:
            num_heads: all of the model's; None if they are not known.
        """
        return None

    def streamed_share(self, prompt_tokens: int, num_heads: int | None = None) -> StreamedShare | None:
        share = self.expected_share(num_heads)
        if share is None or not self.streams:
            return None
        sinks, recent = self.first_and_last(prompt_tokens)
        return StreamedShare(share=share, sinks=sinks, recent=recent)

    def rests(self, layer: int, tokens_BK: Sequence[Sequence[int]], prompt_tokens: int) -> bool:
        retrieving = self.retrieving(layer, len(tokens_BK[0]))
        sinks, recent = self.first_and_last(prompt_tokens)
        sinks_B = [sinks] * len(tokens_BK) if self._part is None else self._part.sinks(sinks)
        room = Phase.decode.spare(self.evict_every)
        return not self._exceeds(retrieving, tokens_BK, [num + recent + room for num in sinks_B])

    @staticmethod
    def _exceeds(retrieving: Sequence[bool], tokens_BK: Sequence[Sequence[int]], limits_B: Sequence[int]) -> bool:
        """Whether a streaming head of any row has more tokens than that."""
        return any(
            tokens > limit
            for tokens_K, limit in zip(tokens_BK, limits_B, strict=True)
            for tokens, retrieves in zip(tokens_K, retrieving, strict=True)
            if not retrieves
        )

    def tokens_after(self, view: LayerView) -> list[int] | None:
        """Known where all heads stream and drop for good, in dense memory."""
        if any(self.retrieving(view.layer, view.num_kv_heads)) or self.compensates or view.head_pads is not None:
            return None
        kept_B, room = self._kept(view)
        return [kept if tokens > kept + room else tokens for kept, tokens in zip(kept_B, view.row_tokens, strict=True)]

    def _kept(self, view: LayerView) -> tuple[list[int], int]:
        """Number of tokens that a streaming head keeps, by row, and of those more that it may have until it is cut."""
        sinks, recent = self.first_and_last(view.prompt_tokens)
        return [num + recent for num in view.sinks(sinks)], view.phase.spare(self.evict_every)

    def keep(self, view: LayerView) -> Tensor | None:
        sinks, recent = self.first_and_last(view.prompt_tokens)
        if (left_B := self.tokens_after(view)) is not None:
            if left_B == view.row_tokens:
                return None
            newest_B1n = torch.arange(view.num_slots, device=view.k_BKnH.device).float().expand(len(view.pads), 1, -1)
            return best_slots(newest_B1n, left_B, view, sinks=view.sinks(sinks), recent=0)
        retrieving = self.retrieving(view.layer, view.num_kv_heads)
        kept_B, room = self._kept(view)
        is_token_BKn = view.is_token_BKn().expand(-1, view.num_kv_heads, -1)
        tokens_BK: list[list[int]] = is_token_BKn.sum(dim=-1).tolist()
        is_cut_B = [
            self._exceeds(retrieving, [tokens_K], [kept + room])
            for tokens_K, kept in zip(tokens_BK, kept_B, strict=True)
        ]
        if not any(is_cut_B):
            return None
        goes_BKn = view.is_token_BKn(after=view.sinks(sinks))
        goes_BKn[..., view.num_slots - recent :] = False
        for row, is_cut in enumerate(is_cut_B):
            goes_BKn[row] &= is_cut
        streams_K1 = row_values(retrieving, is_token_BKn.device).logical_not()[:, None]
        places_n = torch.arange(view.num_slots, device=is_token_BKn.device)
        slots_BKn = places_n.masked_fill(~is_token_BKn | (goes_BKn & streams_K1), -1).sort(dim=-1).values
        most = max(
            min(tokens, kept) if is_cut and not retrieves else tokens
            for is_cut, tokens_K, kept in zip(is_cut_B, tokens_BK, kept_B, strict=True)
            for tokens, retrieves in zip(tokens_K, retrieving, strict=True)
        )
        return slots_BKn[..., view.num_slots - most :]


@dataclass(kw_only=True)
class EverySecondHead(StreamingHeads):
    """Let every second KV head stream, whatever it is for: for timings, which need no table of the model.

    Attributes:
        sinks, recent: first and last tokens that these keep.
    """

    made_by: ClassVar[str] = "nothing"

    heads: str | None = "every second"
    sinks: int = 64
    recent: int = 256

    @property
    def reads(self) -> str | None:
        return None

    def expected_share(self, num_heads: int | None) -> float:
        return 0.5

    def found_in(self, heads: str, model: ModelFacts) -> list[list[bool]]:
        return [[(layer + head) % 2 == 0 for head in range(num)] for layer, num in enumerate(model.heads_of_all)]

    def first_and_last(self, prompt_tokens: int) -> tuple[int, int]:
        return self.sinks, self.recent


def num_best(share: float, num_heads: int) -> int:
    """Number of heads that are a share of so many, at least one unless it is 0."""
    return max(math.ceil(share), round(share * num_heads))


def share_of_others(shares: Sequence[float], num_heads: int | None) -> float:
    """Share of heads that are none of the best of any kind, of different heads, as `best_heads` rounds each kind.

    Args:
        shares: of the best heads of each kind.
        num_heads: all heads; None: their number is not known.
    """
    if num_heads is None:
        return max(0.0, 1 - sum(shares))
    return max(0, num_heads - sum(num_best(share, num_heads) for share in shares)) / num_heads


def best_heads(scores: Sequence[Tensor], share: float) -> list[list[bool]]:
    """Whether a KV head is among the share of all heads with the highest scores; of equal ones the earlier.

    Args:
        scores: of the KV heads (K) of each layer.
        share: rounded as by `num_best`.
    """
    flat_X = torch.cat(list(scores))
    number = num_best(share, len(flat_X))
    chosen_X = torch.zeros(len(flat_X), dtype=torch.bool)
    chosen_X[flat_X.sort(descending=True, stable=True).indices[:number]] = True
    return [chosen_K.tolist() for chosen_K in chosen_X.split([len(scores_K) for scores_K in scores])]
