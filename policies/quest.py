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

import torch
from torch import Tensor

from policies.base import Budget, choice, require_least
from policies.block_index import BlockIndex, BlockRetriever
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


def _scores(q_BKGH: Tensor, digests_BKPX: Tensor) -> Tensor:
    """Scores (B, K, G, P) of pages by what stands for them, in at least float32."""
    if digests_BKPX.shape[-1] > q_BKGH.shape[-1]:
        q_BKGH = torch.cat([q_BKGH.clamp_max(0), q_BKGH.clamp_min(0)], dim=-1)
    scores_BKGP = q_BKGH @ digests_BKPX.mT
    return scores_BKGP.to(torch.promote_types(scores_BKGP.dtype, torch.float32))


class Pages(Index):
    """Index of what stands for every full page of slots.

    Args:
        k_BKnH: keys of the slots so far.
        page: slots per page.
        pads: number of padding slots on the left of each row, whose keys are left out.
        scaling: factor of the scores of this layer.
        digest: what stands for a page.
    """

    def __init__(
        self, k_BKnH: Tensor, *, page: int, pads: list[int], scaling: float, digest: Digest = Digest.bounds
    ) -> None:
        super().__init__(0)
        self.page, self._scaling, self._digest = page, scaling, digest
        self._open_BKSH = k_BKnH[:, :, :0]  # keys of a page that is not full yet
        self._digests_BKPX = _digest(digest, self._open_BKSH.unflatten(2, (0, page)))
        if any(pads):
            k_BKnH = k_BKnH.clone()
            for row, pad in enumerate(pads):
                first = min(pad, k_BKnH.shape[2] - 1)  # a rank may have no token of a row
                k_BKnH[row, :, :pad] = k_BKnH[row, :, first : first + 1]
        self._add(k_BKnH)

    @property
    def num_held(self) -> int:
        """Number of pages per KV head that are not chosen, since they are on the device."""
        return 0

    def leave_out(self, need_BKP: Tensor) -> None:
        """Set the need of these pages to minus infinity."""

    @property
    def num_bytes(self) -> int:
        return self._digests_BKPX.nbytes + self._open_BKSH.nbytes

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        self._add(k_BKCH)

    def _add(self, k_BKCH: Tensor) -> None:
        self.num_slots += k_BKCH.shape[2]
        k_BKCH = torch.cat([self._open_BKSH, k_BKCH], dim=2)
        num_full = k_BKCH.shape[2] // self.page
        self._open_BKSH = k_BKCH[:, :, num_full * self.page :].clone()
        if num_full:
            pages_BKPSH = k_BKCH[:, :, : num_full * self.page].unflatten(2, (num_full, self.page))
            self._digests_BKPX = torch.cat([self._digests_BKPX, _digest(self._digest, pages_BKPSH)], dim=2)

    def scores(self, q_BNH: Tensor) -> Tensor:
        """Scores (B, K, G, P) of all pages, scaled. With `Digest.bounds` no key of a page has a higher one."""
        q_BKGH = q_BNH.unflatten(1, (self._digests_BKPX.shape[1], -1)) * self._scaling
        return _scores(q_BKGH, self._digests_BKPX)


class EventPages(BlockIndex):
    """Index of pages that end where the text surprises the model.

    Args:
        view: the layer after the prompt.
        how: the policy.
    """

    def __init__(self, view: PromptView, how: Quest) -> None:
        dim = view.k_BKnH.shape[3] * (1 if how.digest is Digest.mean else 2)
        super().__init__(view, how, block=how.events.most, together=False, digest_dim=dim)
        self._kind = how.digest

    def digest(self, rows: slice, k_bKPSH: Tensor) -> Tensor:
        return _digest(self._kind, k_bKPSH)

    def scores(self, q_bKGH: Tensor, digests_bKPX: Tensor) -> Tensor:
        return _scores(q_bKGH, digests_bKPX)


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

    fetch: Budget | None = 0.1
    first_layer: int = 2
    page: int = 16
    digest: Digest = Digest.bounds

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, page=1)
        self.digest = choice("digest", Digest, self.digest)

    def index(self, view: PromptView) -> Index:
        if self.needs_surprise:
            return EventPages(view, self)
        return Pages(view.k_BKnH, page=self.page, pads=view.pads, scaling=view.scaling, digest=self.digest)

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Choice | None:
        if self.needs_surprise:
            return super().choose(index, q_BNH, slots)
        assert isinstance(index, Pages)
        whole, rest = divmod(slots.num_slots, self.page)
        chosen = self._num_pages(slots)
        if chosen + index.num_held >= whole:
            return None
        scores_BKGP = index.scores(q_BNH)
        for row, pad in enumerate(slots.pads):
            scores_BKGP[row, ..., : pad // self.page] = -torch.inf
        need_BKP = need_of_group(scores_BKGP, self.group)
        if slots.positions_BKn is None:
            need_BKP[..., whole - self._pages_of(self.recent - rest) :] = torch.inf
        else:  # the first and the last tokens of the text may be on other ranks
            need_BKP.masked_fill_(self._always_BKP(slots, whole), torch.inf)
        for row, pad in enumerate(slots.pads):
            first = pad // self.page
            # A page with padding and tokens is always chosen, so that it is known how much padding is.
            num_sinks = self.sinks if slots.positions_BKn is None else 0
            need_BKP[row, :, first : self._pages_of(pad + num_sinks)] = torch.inf
            # Pages of padding alone come last, those closest to the tokens first.
            need_BKP[row, :, :first] = torch.arange(first, device=need_BKP.device, dtype=need_BKP.dtype) - 1e30
        index.leave_out(need_BKP)
        pages_BKp = need_BKP.topk(chosen, dim=-1, sorted=False).indices
        within_S = torch.arange(self.page, device=pages_BKp.device)
        slots_BKm = (pages_BKp[..., None] * self.page + within_S).flatten(2)
        last = torch.arange(whole * self.page, slots.num_slots, device=pages_BKp.device)
        return Choice(slots_BKm=torch.cat([slots_BKm, last.expand(*slots_BKm.shape[:2], rest)], dim=-1))

    def _always_BKP(self, slots: Slots, whole: int) -> Tensor:  # noqa: N802
        """Mask of whole pages, (B, K, P) or (B, 1, P), that have one of the first or last tokens of the text."""
        assert slots.positions_BKn is not None and slots.next_B is not None
        positions_BKPS = slots.positions_BKn[..., : whole * self.page].unflatten(2, (whole, self.page))
        is_sink = (positions_BKPS >= 0) & (positions_BKPS < self.sinks)
        is_recent = positions_BKPS >= slots.next_B[:, None, None, None] - self.recent
        return (is_sink | is_recent).any(dim=-1)

    def chosen_padding(self, slots: Slots, num_chosen: int) -> list[int]:
        if self.needs_surprise:
            return super().chosen_padding(slots, num_chosen)
        whole, chosen = slots.num_slots // self.page, self._num_pages(slots)
        held = num_chosen // self.page - chosen
        with_tokens = [whole - held - pad // self.page for pad in slots.pads]
        return [
            pad % self.page + max(0, chosen - pages) * self.page
            for pad, pages in zip(slots.pads, with_tokens, strict=True)
        ]

    def _num_pages(self, slots: Slots) -> int:
        """Number of whole pages to choose."""
        rest = slots.num_slots % self.page
        ends = self._pages_of(self.sinks) + 1 + self._pages_of(self.recent - rest)
        return max(ends, self._pages_of(self.num_chosen(slots) - rest))

    def _pages_of(self, num_slots: int) -> int:
        """Number of pages that hold this many slots."""
        return max(0, -(-num_slots // self.page))
