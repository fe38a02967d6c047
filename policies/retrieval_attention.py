"""RetrievalAttention (Liu et al., NeurIPS 2025, arXiv 2409.10516): search a graph of keys that queries have linked.

Queries lie elsewhere than keys, so that links between nearest keys lead a query astray. Here each of the prompt's last
`observed` queries finds its `nearest` keys exactly, and the best of these is linked with the others, both ways (the
projection of RoarGraph, Chen et al., VLDB 2024). Of a key's links the `degree` stay that most queries have made. Each
key is also linked to its neighbours in the text, so that keys that no query has found can be reached.

A query begins at the `width` keys that most queries have found, and `hops` times scores what the best `width` keys
are linked to that it has not followed yet. All rows and heads search at once. What a query head has found is compared
as exact scores are; attention to the chosen slots, sinks and recent tokens is exact, where the paper merges two parts.
Tokens that came after the graph are all scored, until it is made anew, every 256 of them.

The paper searches on the host, query by query, and fetches 100 tokens for each query head; code of its graph is not
public. Here the device searches, and reads the keys that it scores where they are stored, over the link to the host.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, X queries of a KV head, m nearest keys, D degree,
# E entries, c candidates, w followed ones, f found ones, C new tokens, H key dim, e edges.

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from policies.base import Budget, require, require_least
from policies.retriever import Choice, Group, Index, PromptView, Retriever, Slots, most_needed

PART = 128
"""Queries that are compared with all keys at once."""
UNFOUND = 1e9
"""The need of slots that no query has found is below that of all others by this, the newest first."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Keys that queries have found, in no order.

    Attributes:
        slots_BKGf, scores_BKGf: the best slots and their scores; minus infinity where there are fewer.
        num_scored: keys that were scored, by all queries together.
    """

    slots_BKGf: Tensor
    scores_BKGf: Tensor
    num_scored: Tensor


class KeyGraph(Index):
    """Graph of one layer's keys in each KV head.

    Args:
        view: the layer after the prompt.
        nearest: keys that each query of the prompt finds.
        degree: links of a key, beside those to its neighbours in the text.
        entries: keys where a search begins.
    """

    def __init__(self, view: PromptView, *, nearest: int, degree: int, entries: int) -> None:
        super().__init__(view.k_BKnH.shape[2])
        self.stored, self._scaling, self._pads = view.stored, view.scaling, list(view.pads)
        found_BKXm, holds_BKXm = nearest_keys(view, min(nearest, self.num_slots))
        self.links_BKnD = links(found_BKXm, holds_BKXm, self.num_slots, degree)
        counts_BKn = holds_BKXm.new_zeros(*holds_BKXm.shape[:2], self.num_slots, dtype=torch.int64)
        counts_BKn.scatter_add_(2, found_BKXm.flatten(2), holds_BKXm.flatten(2).long())
        counts_BKn.masked_fill_(view.positions_BKn < 0, -1)
        # Of equal ones the first in the text, whatever the padding.
        self.entries_BKE = counts_BKn.argsort(dim=-1, descending=True, stable=True)[..., :entries].clone()

    @property
    def num_bytes(self) -> int:
        return self.links_BKnD.nbytes + self.entries_BKE.nbytes

    def fork(self, stored: Callable[[], Tensor]) -> Index:
        other = copy(self)
        other.stored = stored
        return other

    def search(self, q_BNH: Tensor, *, number: int, width: int, hops: int) -> Found:
        """Find the slots with the best scores.

        Args:
            number: of slots that each query finds at most.
            width: links of so many keys are followed in each of the hops.
        """
        k_BKnH, none = self.stored(), self.num_slots
        q_BKGH = q_BNH.unflatten(1, (k_BKnH.shape[1], -1)) * self._scaling
        seen_BKGn = torch.zeros(*q_BKGH.shape[:3], none + 1, dtype=torch.bool, device=k_BKnH.device)
        followed_BKGn = seen_BKGn.clone()
        seen_BKGn[..., none] = True
        for row, pad in enumerate(self._pads):
            seen_BKGn[row, ..., :pad] = True
        new_C = torch.arange(self.links_BKnD.shape[2], none, device=k_BKnH.device)
        first_BKc = torch.cat([self.entries_BKE, new_C.expand(*k_BKnH.shape[:2], -1)], dim=2)
        first_BKGc = first_BKc.unsqueeze(2).expand(-1, -1, q_BKGH.shape[2], -1)
        slots, scores = _scored(first_BKGc, q_BKGH, k_BKnH, seen_BKGn)
        num_scored = (scores > -torch.inf).sum()
        for _ in range(hops):
            best = scores.masked_fill(followed_BKGn.gather(3, slots), -torch.inf).topk(min(width, scores.shape[3]))
            at_BKGw = slots.gather(3, best.indices).masked_fill_(best.values == -torch.inf, none)
            followed_BKGn.scatter_(3, at_BKGw, True)
            more_slots, more = _scored(self._linked(at_BKGw), q_BKGH, k_BKnH, seen_BKGn)
            num_scored += (more > -torch.inf).sum()
            slots, scores = torch.cat([slots, more_slots], dim=3), torch.cat([scores, more], dim=3)
            kept = scores.topk(min(max(number, width), scores.shape[3]))
            slots, scores = slots.gather(3, kept.indices), kept.values
        return Found(slots_BKGf=slots.clamp_max(none - 1), scores_BKGf=scores, num_scored=num_scored)

    def _linked(self, at_BKGw: Tensor) -> Tensor:
        """Slots to which keys are linked (B, K, G, c); the number of slots stands for none."""
        num_linked, degree = self.links_BKnD.shape[2:]
        at_BKx1 = at_BKGw.clamp_max(num_linked - 1).flatten(2).unsqueeze(3)
        to_BKGwD = self.links_BKnD.gather(2, at_BKx1.expand(-1, -1, -1, degree)).unflatten(2, at_BKGw.shape[2:])
        at_BKGw1 = at_BKGw.unsqueeze(4)
        to_BKGwD = to_BKGwD.long().masked_fill_(at_BKGw1 >= num_linked, -1)
        to_BKGwD = torch.cat([to_BKGwD, at_BKGw1 - 1, at_BKGw1 + 1], dim=4)
        return to_BKGwD.masked_fill_((to_BKGwD < 0) | (at_BKGw1 == self.num_slots), self.num_slots).flatten(3)


def _scored(slots_BKGc: Tensor, q_BKGH: Tensor, k_BKnH: Tensor, seen_BKGn: Tensor) -> tuple[Tensor, Tensor]:
    """The slots with their scores, in at least float32; minus infinity if they were seen, are none or come twice.

    Args:
        seen_BKGn: whether each slot was scored, or is padding; and True in one more place, which is none.
    """
    slots_BKGc = slots_BKGc.sort(dim=-1).values
    is_again = functional.pad(slots_BKGc[..., 1:] == slots_BKGc[..., :-1], (1, 0))
    skipped_BKGc = is_again | seen_BKGn.gather(3, slots_BKGc)
    seen_BKGn.scatter_(3, slots_BKGc, True)
    at_BKx1 = slots_BKGc.clamp_max(k_BKnH.shape[2] - 1).flatten(2).unsqueeze(3)
    k_BKGcH = k_BKnH.take_along_dim(at_BKx1, dim=2).unflatten(2, slots_BKGc.shape[2:])
    scores_BKGc = (k_BKGcH @ q_BKGH.unsqueeze(4)).squeeze(4)
    scores_BKGc = scores_BKGc.to(torch.promote_types(scores_BKGc.dtype, torch.float32))
    return slots_BKGc, scores_BKGc.masked_fill(skipped_BKGc, -torch.inf)


def nearest_keys(view: PromptView, number: int) -> tuple[Tensor, Tensor]:
    """The nearest keys (B, K, X, m) of each query, the best first, and whether they are some: no padding has any."""
    q_BKXH = view.q_BNwH.unflatten(1, (view.k_BKnH.shape[1], -1)).flatten(2, 3)
    is_padding_BK1n = (view.positions_BKn < 0).unsqueeze(2)
    best = [
        (part_BKxH @ view.k_BKnH.mT).masked_fill_(is_padding_BK1n, -torch.inf).topk(number)
        for part_BKxH in q_BKXH.split(PART, dim=2)
    ]
    holds_BKXm = torch.cat([each.values for each in best], dim=2) > -torch.inf
    return torch.cat([each.indices for each in best], dim=2), holds_BKXm & q_BKXH.any(dim=-1, keepdim=True)


def links(found_BKXm: Tensor, holds_BKXm: Tensor, num_slots: int, degree: int) -> Tensor:
    """Links (B, K, n, D), int32, of each key to those that most queries found with it; -1 is none.

    Args:
        found_BKXm: nearest keys of each query, the best first.
        holds_BKXm: those that count.
    """
    best_BKX1, other_BKXm = found_BKXm[..., :1], found_BKXm[..., 1:]
    nothing = num_slots * num_slots
    edges = (best_BKX1 * num_slots + other_BKXm, other_BKXm * num_slots + best_BKX1)
    edges_BKe = torch.cat([edge.masked_fill(~holds_BKXm[..., 1:], nothing).flatten(2) for edge in edges], dim=2)
    edges_BKe = functional.pad(edges_BKe, (0, 1), value=nothing).sort(dim=-1).values  # one at least, of one token, too
    is_first_BKe = functional.pad(edges_BKe[..., 1:] != edges_BKe[..., :-1], (1, 0), value=True)
    run_BKe = is_first_BKe.cumsum(dim=-1) - 1
    counts_BKe = torch.zeros_like(edges_BKe).scatter_add_(2, run_BKe, torch.ones_like(run_BKe)).gather(2, run_BKe)
    edges_BKe = edges_BKe.masked_fill(~is_first_BKe, nothing)
    # By key, and then by the number of queries. No shape depends on the values, for which the host would wait.
    most = edges_BKe.shape[2]
    order_BKe = (edges_BKe // num_slots * (most + 1) + most - counts_BKe).argsort(dim=-1, stable=True)
    edges_BKe = edges_BKe.gather(2, order_BKe)
    source_BKe = edges_BKe // num_slots
    first_BKe = torch.searchsorted(source_BKe, source_BKe)
    place_BKe = (torch.arange(edges_BKe.shape[2], device=first_BKe.device) - first_BKe).clamp_max(degree)
    links_BKx = torch.full_like(edges_BKe[..., :1], -1, dtype=torch.int32).repeat(1, 1, (num_slots + 1) * (degree + 1))
    links_BKx.scatter_(2, source_BKe * (degree + 1) + place_BKe, (edges_BKe % num_slots).int())
    return links_BKx.unflatten(2, (num_slots + 1, degree + 1))[:, :, :-1, :-1].contiguous()


@dataclass(kw_only=True)
class RetrievalAttention(Retriever, name="retrieval_attention"):
    """Retrieve the slots that a search in a graph of keys finds, `fetch` in total.

    Attributes:
        observed: last tokens of the prompt whose queries link keys.
        nearest: keys that each of these queries links.
        degree: links of a key that stay.
        width: keys whose links are followed in a hop, and where a search begins.
        hops: times that a search follows links.

    Raises:
        ValueError: an option is out of range.
    """

    takes_full_pool: ClassVar[bool] = False  # neighbours are those in the text

    fetch: Budget | None = 0.1
    sinks: int = 128
    recent: int = 512
    observed: int = 1024  # type: ignore[misc]  # a constant of most policies
    nearest: int = 32
    degree: int = 32
    width: int = 32
    hops: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, observed=1, nearest=2, degree=1, width=1, hops=1)
        require(self.fetch is not None, "fetch", self.fetch, "must be given: a search finds as many")
        reason = "does not go with retrieval_attention, whose query heads search alone; leave it out"
        require(self.group is Group.union, "group", self.group.name, reason)

    def index(self, view: PromptView) -> KeyGraph:
        return KeyGraph(view, nearest=self.nearest, degree=self.degree, entries=self.width)

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Choice | None:
        assert isinstance(index, KeyGraph)
        num_chosen = self.num_chosen(slots)
        if num_chosen == slots.num_slots:
            return None
        found = index.search(q_BNH, number=num_chosen, width=self.width, hops=self.hops)
        relative_BKGf = found.scores_BKGf - found.scores_BKGf.amax(dim=-1, keepdim=True)
        within_n = torch.arange(slots.num_slots, device=relative_BKGf.device, dtype=torch.float64)
        need_BKn = (within_n - UNFOUND - slots.num_slots).repeat(*relative_BKGf.shape[:2], 1)
        need_BKn.scatter_reduce_(2, found.slots_BKGf.flatten(2), relative_BKGf.double().flatten(2), "amax")
        slots.mark(need_BKn, sinks=self.sinks, recent=self.recent)
        return most_needed(need_BKn, num_chosen, slots)
