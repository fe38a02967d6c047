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

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from policies.options import Budget, require, require_least
from policies.precision import widened
from policies.retriever import Group, Index, PromptView, Retriever, Slots

PART = 128
"""Queries that are compared with all keys at once."""
UNFOUND = 1e9
"""The need of slots that no query has found is below that of all others by this, the newest first."""


class KeyGraph(Index):
    """Graph of one layer's keys in each KV head."""

    how: RetrievalAttention

    def __init__(self, view: PromptView, how: RetrievalAttention) -> None:
        super().__init__(view, how)
        found_BKXm, holds_BKXm = nearest_keys(view, min(how.nearest, self.num_slots))
        self.links_BKnD = links(found_BKXm, holds_BKXm, self.num_slots, how.degree)
        counts_BKn = holds_BKXm.new_zeros(*holds_BKXm.shape[:2], self.num_slots, dtype=torch.int64)
        counts_BKn.scatter_add_(2, found_BKXm.flatten(2), holds_BKXm.flatten(2).long())
        counts_BKn.masked_fill_(view.positions_BKn < 0, -1)
        # Of equal ones the first in the text, whatever the padding.
        self.entries_BKE = counts_BKn.argsort(dim=-1, descending=True, stable=True)[..., : how.width].clone()

    @property
    def num_bytes(self) -> int:
        return self.links_BKnD.nbytes + self.entries_BKE.nbytes

    def need(self, q_BNH: Tensor, slots: Slots) -> Tensor:
        slots_BKGf, scores_BKGf, _ = self.search(q_BNH, self.how.num_chosen(slots))
        relative_BKGf = scores_BKGf.double() - scores_BKGf.amax(dim=-1, keepdim=True)
        within_n = torch.arange(self.num_slots, device=relative_BKGf.device, dtype=torch.float64)
        need_BKn = (within_n - UNFOUND - self.num_slots).repeat(*relative_BKGf.shape[:2], 1)
        return need_BKn.scatter_reduce_(2, slots_BKGf.flatten(2), relative_BKGf.flatten(2), "amax")

    def search(self, q_BNH: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Find the slots with the best scores, at most this number for each query.

        Returns:
            the best slots (B, K, G, f), in no order; their scores, in at least float32, minus infinity where there are
            fewer; and whether each slot (B, K, G, n) was scored, or is padding.
        """
        k_BKnH, num_linked = self.stored(), self.links_BKnD.shape[2]
        q_BKGH1 = (q_BNH.unflatten(1, (k_BKnH.shape[1], -1)) * self.scaling).unsqueeze(4)
        seen_BKGn = torch.zeros(*q_BKGH1.shape[:3], self.num_slots, dtype=torch.bool, device=k_BKnH.device)
        followed_BKGn = seen_BKGn.clone()
        followed_BKGn[..., num_linked:] = True  # later tokens have no links
        for row, pad in enumerate(self.pads):
            seen_BKGn[row, ..., :pad] = True

        def scored(slots_BKGc: Tensor) -> tuple[Tensor, Tensor]:
            """The slots with their scores; minus infinity if they were seen or come twice."""
            slots_BKGc = slots_BKGc.sort(dim=-1).values
            is_again_BKGc = functional.pad(slots_BKGc[..., 1:] == slots_BKGc[..., :-1], (1, 0))
            skipped_BKGc = is_again_BKGc | seen_BKGn.gather(3, slots_BKGc)
            seen_BKGn.scatter_(3, slots_BKGc, True)
            scores_BKGc = (k_BKnH.unsqueeze(2).take_along_dim(slots_BKGc.unsqueeze(4), dim=3) @ q_BKGH1).squeeze(4)
            return slots_BKGc, widened(scores_BKGc).masked_fill(skipped_BKGc, -torch.inf)

        new_C = torch.arange(num_linked, self.num_slots, device=k_BKnH.device)
        first_BKc = torch.cat([self.entries_BKE, new_C.expand(*k_BKnH.shape[:2], -1)], dim=2)
        slots, scores = scored(first_BKc.unsqueeze(2).expand(-1, -1, q_BKGH1.shape[2], -1))
        for _ in range(self.how.hops):
            open_scores = scores.masked_fill(followed_BKGn.gather(3, slots), -torch.inf)
            followed = open_scores.topk(min(self.how.width, slots.shape[3]))
            # Where fewer are open the first entry stands for them: it has been followed, so that its links are seen.
            entry_BK11, is_open_BKGw = self.entries_BKE[:, :, None, :1], followed.values > -torch.inf
            from_BKGw = slots.gather(3, followed.indices).where(is_open_BKGw, entry_BK11)
            followed_BKGn.scatter_(3, from_BKGw, True)
            from_BKGw1 = from_BKGw.unsqueeze(4)
            to_BKGwD = self.links_BKnD.unsqueeze(2).take_along_dim(from_BKGw1, dim=3).long()
            near_BKGw2 = torch.cat([from_BKGw1 - 1, from_BKGw1 + 1], dim=4).clamp(0, num_linked - 1)
            more_slots, more_scores = scored(torch.cat([to_BKGwD, near_BKGw2], dim=4).flatten(3))
            slots, scores = torch.cat([slots, more_slots], dim=3), torch.cat([scores, more_scores], dim=3)
            best = scores.topk(min(max(number, self.how.width), slots.shape[3]))
            slots, scores = slots.gather(3, best.indices), best.values
        return slots, scores, seen_BKGn


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
    """Links (B, K, n, D), int32, of each key to those that most queries found with it; to itself if these are fewer.

    Args:
        found_BKXm: nearest keys of each query, the best first.
        holds_BKXm: those that count.
    """
    shape, device = (*found_BKXm.shape[:2], num_slots), found_BKXm.device
    # Keys are numbered over all rows and heads. A pair of keys is one number, too, by the first of them.
    num_keys = math.prod(shape)
    none = num_keys * num_keys
    keys_BKXm = found_BKXm + torch.arange(0, num_keys, num_slots, device=device).view(*shape[:2], 1, 1)
    ends = torch.stack(torch.broadcast_tensors(keys_BKXm[..., :1], keys_BKXm[..., 1:]))
    pairs = (ends * num_keys + ends.flip(0)).masked_fill(~holds_BKXm[..., 1:], none)
    pairs_e = pairs.flatten().sort().values
    # Each once, by its first key, then by the number of queries. Shapes that depended on values would make hosts wait.
    each_e, first_e = torch.arange(len(pairs_e), device=device), torch.searchsorted(pairs_e, pairs_e)
    counts_e = torch.searchsorted(pairs_e, pairs_e, right=True) - first_e
    pairs_e = pairs_e.masked_fill(first_e < each_e, none)
    pairs_e = pairs_e[(pairs_e // num_keys * (len(pairs_e) + 1) - counts_e).argsort(stable=True)]
    # The first ones of each key; a row and a column take what is none or too many.
    key_e = pairs_e // num_keys
    place_e = (each_e - torch.searchsorted(key_e, key_e)).clamp_max(degree)
    own_n1 = torch.arange(num_slots, dtype=torch.int32, device=device).unsqueeze(1)
    to_xD = functional.pad(own_n1.repeat(shape[0] * shape[1], degree), (0, 1, 0, 1))
    to_xD[key_e, place_e] = (pairs_e % num_slots).int()
    return to_xD[:-1, :-1].reshape(*shape, degree)


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

    index_class = KeyGraph
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
