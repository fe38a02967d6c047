"""Quest (Tang et al., ICML 2024): retrieve pages of tokens by an upper bound of the scores in each page.

For every page of consecutive tokens the device keeps the minimum and maximum of the keys in each dim. The sum over dims
of max(q_i min_i, q_i max_i) bounds the scores in the page (Sec. 3.3, Algorithm 1). The layer's own query chooses.

Other keys may stand for a page. ArkVale (Chen et al., NeurIPS 2024) shrinks the box between minimum and maximum to the
keys' mean distance from its centre: closer to the scores inside, and no bound any more. ShadowKV (Sun et al., ICML
2025) takes the mean.

`digest=shrunk` and `digest=mean` are these. ArkVale chooses once for all heads and attends to all pages on the device.

Pages of many sizes (`events`) are taken in the order of their scores until the budget is full, of the last one the
latest tokens; tokens that are in no page yet come before all.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, m chosen ones, P pages, p chosen ones, S slots of a
# page, C new tokens, H key dim.

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from policies.block_index import BlockIndex, BlockRetriever, block_scores
from policies.options import Budget, choice, require_least
from policies.retriever import Choice, Index, PromptView, Slots, need_of_group


class Digest(Enum):
    """Digest that stands for the keys of a page; see `Quest`."""

    bounds = "bounds"
    shrunk = "shrunk"
    mean = "mean"


def _digest(kind: Digest, k_BKPSH: Tensor) -> Tensor:
    """What stands for each page (B, K, P, X): its mean key, or the lower and upper end in each dim, side by side."""
    if kind is Digest.mean:
        return k_BKPSH.mean(dim=3)
    least_BKPH, most_BKPH = k_BKPSH.amin(dim=3), k_BKPSH.amax(dim=3)
    if kind is Digest.bounds:
        return torch.cat([least_BKPH, most_BKPH], dim=-1)
    centre_BKPH = (least_BKPH + most_BKPH) / 2
    distance_BKPH = (k_BKPSH - centre_BKPH.unsqueeze(3)).abs().mean(dim=3)
    return torch.cat([centre_BKPH - distance_BKPH, centre_BKPH + distance_BKPH], dim=-1)


class Pages(Index):
    """Index of what stands for every full page of slots."""

    num_held = 0
    """Number of pages per KV head that are not chosen, since they are on the device."""

    how: Quest

    def __init__(self, view: PromptView, how: Quest) -> None:
        super().__init__(view, how)
        k_BKnH, self.num_slots = view.k_BKnH, 0
        self._open_BKSH = k_BKnH[:, :, :0]  # keys of a page that is not full yet
        self._digests_BKPX = _digest(how.digest, self._open_BKSH.unflatten(2, (0, how.page)))
        if any(self.pads):
            k_BKnH = k_BKnH.clone()
            for row, pad in enumerate(self.pads):
                first = min(pad, k_BKnH.shape[2] - 1)  # a rank may have no token of a row
                k_BKnH[row, :, :pad] = k_BKnH[row, :, first : first + 1]
        Pages.append(self, k_BKnH, view.v_BKnV)

    def leave_out(self, need_BKP: Tensor) -> None:
        """Set the need of these pages to minus infinity."""

    @property
    def num_bytes(self) -> int:
        return self._digests_BKPX.nbytes + self._open_BKSH.nbytes

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        self.num_slots += k_BKCH.shape[2]
        k_BKCH = torch.cat([self._open_BKSH, k_BKCH], dim=2)
        page = self.how.page
        num_full = k_BKCH.shape[2] // page
        self._open_BKSH = k_BKCH[:, :, num_full * page :].clone()
        if num_full:
            pages_BKPSH = k_BKCH[:, :, : num_full * page].unflatten(2, (num_full, page))
            self._digests_BKPX = torch.cat([self._digests_BKPX, _digest(self.how.digest, pages_BKPSH)], dim=2)

    def page_scores(self, q_BNH: Tensor) -> Tensor:
        """Scores (B, K, G, P) of all pages, scaled. With `Digest.bounds` no key of a page has a higher one."""
        return block_scores(q_BNH.unflatten(1, (self.num_kv_heads, -1)) * self.scaling, self._digests_BKPX)

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        how = self.how
        whole, rest = divmod(slots.num_slots, how.page)
        chosen = self._num_pages(slots)
        if chosen + self.num_held >= whole:
            return None
        scores_BKGP = self.page_scores(q_BNH)
        for row, pad in enumerate(slots.pads):
            scores_BKGP[row, ..., : pad // how.page] = -torch.inf
        need_BKP = need_of_group(scores_BKGP, how.group)
        if slots.positions_BKn is None:
            need_BKP[..., whole - self._pages_of(how.recent - rest) :] = torch.inf
        else:  # the first and the last tokens of the text may be on other ranks
            need_BKP.masked_fill_(self._always_BKP(slots, whole), torch.inf)
        for row, pad in enumerate(slots.pads):
            first = pad // how.page
            # A page with padding and tokens is always chosen, so that it is known how much padding is.
            num_sinks = how.sinks if slots.positions_BKn is None else 0
            need_BKP[row, :, first : self._pages_of(pad + num_sinks)] = torch.inf
            # Pages of padding alone come last, those closest to the tokens first.
            need_BKP[row, :, :first] = torch.arange(first, device=need_BKP.device, dtype=need_BKP.dtype) - 1e30
        self.leave_out(need_BKP)
        pages_BKp = need_BKP.topk(chosen, dim=-1, sorted=False).indices
        within_S = torch.arange(how.page, device=pages_BKp.device)
        slots_BKm = (pages_BKp[..., None] * how.page + within_S).flatten(2)
        last = torch.arange(whole * how.page, slots.num_slots, device=pages_BKp.device)
        return Choice(slots_BKm=torch.cat([slots_BKm, last.expand(*slots_BKm.shape[:2], rest)], dim=-1))

    def _always_BKP(self, slots: Slots, whole: int) -> Tensor:  # noqa: N802
        """Mask of whole pages, (B, K, P) or (B, 1, P), that have one of the first or last tokens of the text."""
        assert slots.positions_BKn is not None and slots.next_B is not None
        positions_BKPS = slots.positions_BKn[..., : whole * self.how.page].unflatten(2, (whole, self.how.page))
        is_sink = (positions_BKPS >= 0) & (positions_BKPS < self.how.sinks)
        is_recent = positions_BKPS >= slots.next_B[:, None, None, None] - self.how.recent
        return (is_sink | is_recent).any(dim=-1)

    def chosen_padding(self, slots: Slots, num_chosen: int) -> list[int]:
        page = self.how.page
        whole, chosen = slots.num_slots // page, self._num_pages(slots)
        held = num_chosen // page - chosen
        with_tokens = [whole - held - pad // page for pad in slots.pads]
        return [pad % page + max(0, chosen - pages) * page for pad, pages in zip(slots.pads, with_tokens, strict=True)]

    def _num_pages(self, slots: Slots) -> int:
        """Number of whole pages to choose."""
        how, rest = self.how, slots.num_slots % self.how.page
        ends = self._pages_of(how.sinks) + 1 + self._pages_of(how.recent - rest)
        return max(ends, self._pages_of(how.num_chosen(slots) - rest))

    def _pages_of(self, num_slots: int) -> int:
        """Number of pages that hold this many slots."""
        return max(0, -(-num_slots // self.how.page))


class EventPages(BlockIndex):
    """Index of pages that end where the text surprises the model."""

    how: Quest

    def digest(self, rows: slice, k_bKPSH: Tensor) -> Tensor:
        return _digest(self.how.digest, k_bKPSH)


@dataclass(kw_only=True)
class Quest(BlockRetriever, name="quest"):
    """Retrieve whole pages with about `fetch` slots in total, including the first and the last ones.

    Attributes:
        page: slots per page, if these are all of one size (`events`).
        digest: what stands for the keys of a page: bounds (their minimum and maximum in each dim), shrunk (the centre
            of these, plus and minus the keys' mean distance from it: ArkVale) or mean (their mean: ShadowKV).

    Raises:
        ValueError: an option is out of range.
    """

    index_class: ClassVar[type[Index]] = Pages

    fetch: Budget | None = 0.1
    first_layer: int = 2
    page: int = 16
    digest: Digest = Digest.bounds

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, page=1)
        self.digest = choice("digest", Digest, self.digest)

    def index(self, view: PromptView) -> Index:
        return EventPages(view, self) if self.needs_surprise else super().index(view)
