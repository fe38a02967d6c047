"""Quest (Tang et al., ICML 2024): retrieve pages of tokens by an upper bound of the scores in each page.

For every page of consecutive tokens the device keeps the minimum and maximum of the keys in each dim. The sum over dims
of max(q_i min_i, q_i max_i) bounds the scores in the page (Sec. 3.3, Algorithm 1). The layer's own query chooses.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, m chosen ones, P pages, p chosen ones, S slots of a
# page, C new tokens, H key dim.

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Budget, require_least
from policies.retriever import Index, PromptView, Retriever, Slots


class Pages(Index):
    """Index of the minimum and maximum keys (B, K, P, H) of every page of slots.

    Args:
        k_BKnH: keys of the slots so far.
        page: slots per page.
        pads: number of padding slots on the left of each row, whose keys are left out.
        scaling: factor of the scores of this layer.
    """

    def __init__(self, k_BKnH: Tensor, *, page: int, pads: list[int], scaling: float) -> None:
        super().__init__(0)
        self.page, self._scaling = page, scaling
        self._least_BKPH = k_BKnH.new_empty(*k_BKnH.shape[:2], 0, k_BKnH.shape[3])
        self._most_BKPH = self._least_BKPH
        if any(pads):
            k_BKnH = k_BKnH.clone()
            for row, pad in enumerate(pads):
                first = min(pad, k_BKnH.shape[2] - 1)  # a rank may have no token of a row
                k_BKnH[row, :, :pad] = k_BKnH[row, :, first : first + 1]
        self.append(k_BKnH)

    @property
    def num_bytes(self) -> int:
        return self._least_BKPH.nbytes + self._most_BKPH.nbytes

    def append(self, k_BKCH: Tensor) -> None:
        into_last = min(-self.num_slots % self.page, k_BKCH.shape[2])
        self.num_slots += k_BKCH.shape[2]
        first_BKCH, k_BKCH = k_BKCH[:, :, :into_last], k_BKCH[:, :, into_last:]
        if into_last:
            least_BKH, most_BKH = self._least_BKPH[:, :, -1], self._most_BKPH[:, :, -1]
            torch.minimum(least_BKH, first_BKCH.amin(dim=2), out=least_BKH)
            torch.maximum(most_BKH, first_BKCH.amax(dim=2), out=most_BKH)
        num_full = k_BKCH.shape[2] // self.page
        full_BKCH, rest_BKCH = k_BKCH[:, :, : num_full * self.page], k_BKCH[:, :, num_full * self.page :]
        for pages_BKPSH in (full_BKCH.unflatten(2, (num_full, self.page)), rest_BKCH.unsqueeze(2)):
            if pages_BKPSH.numel():
                self._least_BKPH = torch.cat([self._least_BKPH, pages_BKPSH.amin(dim=3)], dim=2)
                self._most_BKPH = torch.cat([self._most_BKPH, pages_BKPSH.amax(dim=3)], dim=2)

    def keep(self, slots_BKm: Tensor, k_BKmH: Tensor) -> None:
        kept = Pages(k_BKmH, page=self.page, pads=[], scaling=self._scaling)
        self.__dict__.update(kept.__dict__)

    def overwrite(self, slots_BK: Tensor, k_BKH: Tensor) -> None:
        pages_BK1H = (slots_BK // self.page)[:, :, None, None].expand(*k_BKH.shape[:2], 1, k_BKH.shape[2])
        self._least_BKPH.scatter_reduce_(2, pages_BK1H, k_BKH.unsqueeze(2), "amin")
        self._most_BKPH.scatter_reduce_(2, pages_BK1H, k_BKH.unsqueeze(2), "amax")

    def fork(self, stored: Callable[[], Tensor]) -> Pages:
        other = copy.copy(self)
        other._least_BKPH, other._most_BKPH = self._least_BKPH.clone(), self._most_BKPH.clone()
        return other

    def bounds(self, q_BNH: Tensor) -> Tensor:
        """Upper bounds (B, K, G, P) of the scores in each page, scaled, in at least float32."""
        q_BKGH = q_BNH.unflatten(1, (self._most_BKPH.shape[1], -1)) * self._scaling
        most = q_BKGH.clamp_min(0) @ self._most_BKPH.mT + q_BKGH.clamp_max(0) @ self._least_BKPH.mT
        return most.to(torch.promote_types(most.dtype, torch.float32))


@dataclass(kw_only=True)
class Quest(Retriever):
    """Retrieve whole pages with about `fetch` slots in total, including the first and the last ones.

    Attributes:
        page: slots per page.

    Raises:
        ValueError: an option is out of range.
    """

    fetch: Budget | None = 0.1
    first_layer: int = 2
    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, page=1)
        if self.pool.bytes is not None:
            raise ValueError(
                "quest's pages are of consecutive tokens, and a full pool mixes them; leave policy.pool.bytes out"
            )

    def index(self, view: PromptView) -> Pages:
        return Pages(view.k_BKnH, page=self.page, pads=view.pads, scaling=view.scaling)

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Tensor | None:
        assert isinstance(index, Pages)
        whole, rest = divmod(slots.num_slots, self.page)
        chosen = self._num_pages(slots)
        if chosen >= whole:
            return None
        bounds_BKGP = index.bounds(q_BNH)[..., :whole]
        need_BKP = (bounds_BKGP - bounds_BKGP.amax(dim=-1, keepdim=True)).amax(dim=2)
        if slots.positions_BKn is None:
            num_sinks = max(self.sinks, 1)
            need_BKP[..., whole - self._pages_of(self.recent - rest) :] = torch.inf
        else:  # the first and the last tokens of the text may be on other ranks
            num_sinks = 1
            need_BKP.masked_fill_(self._always_BKP(slots, whole), torch.inf)
        for row, pad in enumerate(slots.pads):
            first = pad // self.page
            # A page with padding and tokens is always chosen, so that it is known how much padding is.
            if slots.positions_BKn is None or pad % self.page:
                need_BKP[row, :, first : (pad + num_sinks - 1) // self.page + 1] = torch.inf
            # Pages of padding alone come last, those closest to the tokens first.
            need_BKP[row, :, :first] = torch.arange(first, device=need_BKP.device, dtype=need_BKP.dtype) - 1e30
        pages_BKp = need_BKP.topk(chosen, dim=-1, sorted=False).indices
        within_S = torch.arange(self.page, device=pages_BKp.device)
        slots_BKm = (pages_BKp[..., None] * self.page + within_S).flatten(2)
        last = torch.arange(whole * self.page, slots.num_slots, device=pages_BKp.device)
        return torch.cat([slots_BKm, last.expand(*slots_BKm.shape[:2], rest)], dim=-1)

    def _always_BKP(self, slots: Slots, whole: int) -> Tensor:  # noqa: N802
        """Which whole pages, (B, K, P) or (B, 1, P), have one of the first or last tokens of the text."""
        assert slots.positions_BKn is not None and slots.next_B is not None
        positions_BKPS = slots.positions_BKn[..., : whole * self.page].unflatten(2, (whole, self.page))
        is_sink = (positions_BKPS >= 0) & (positions_BKPS < max(self.sinks, 1))
        is_recent = positions_BKPS >= slots.next_B[:, None, None, None] - self.recent
        return (is_sink | is_recent).any(dim=-1)

    def chosen_padding(self, slots: Slots, num_chosen: int) -> list[int]:
        whole, chosen = slots.num_slots // self.page, self._num_pages(slots)
        with_tokens = [whole - pad // self.page for pad in slots.pads]
        return [
            pad % self.page + max(0, chosen - pages) * self.page
            for pad, pages in zip(slots.pads, with_tokens, strict=True)
        ]

    def _num_pages(self, slots: Slots) -> int:
        """Number of whole pages to choose."""
        rest = slots.num_slots % self.page
        ends = self._pages_of(max(self.sinks, 1)) + 1 + self._pages_of(self.recent - rest)
        return max(ends, self._pages_of(self.num_chosen(slots) - rest))

    def _pages_of(self, num_slots: int) -> int:
        """Number of pages that hold this many slots."""
        return max(0, -(-num_slots // self.page))
