"""ShadowKV (Sun et al., ICML 2025): pages by their mean keys, with keys rebuilt on the device so that values travel.

The mean of a page's keys stands for it (its landmark). Pages with a key that is least similar to their mean, by cosine,
stay on the device as they are and are always attended to (outliers, Algorithm 1). The device also has the prompt's keys
as factors of low rank, from which those of chosen pages are rebuilt, while their values are fetched (Algorithm 2). Keys
of later tokens are on the device, too, exact. Published code keeps new tokens in a buffer of fixed size; here they are
pages as any other.

`outliers` is 48 in each KV head, as published; in a batch at most as many as each row has. `rank` is 160, of the 1,024
dims of all KV heads there; null fetches keys, too. It is that of keys before RoPE, where rotations are known. For n
tokens factors take n x rank numbers per layer; with ranks.tensor each rank has factors of its own heads, of this rank.
It does not go with `late`.
"""

# Legend: B batch, N query heads, K kv heads, C new slots, m slots that are asked for, P pages, o outlier pages, S slots
# of a page, H key dim, X = H + V.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policies.low_rank_keys import LowRankKeys
from policies.options import require, require_least
from policies.quest import Digest, Pages, Quest
from policies.retriever import Choice, Group, OnDevice, PromptView, Slots


class ShadowPages(Pages):
    """Index of landmarks, with outlier pages and the keys of all slots."""

    how: ShadowKV

    def __init__(self, view: PromptView, how: ShadowKV) -> None:
        super().__init__(view, how)
        self._low_rank = None if how.rank is None else LowRankKeys(view, how.rank)
        self._new_BKCH = view.k_BKnH[:, :, :0]
        whole = view.k_BKnH.shape[2] // how.page
        firsts = [-(-(pad + how.sinks) // how.page) for pad in view.pads]  # pages of tokens that may be held
        self.num_held = max(0, min(how.outliers, *(whole - first for first in firsts)))
        k_BKPSH = view.k_BKnH[:, :, : whole * how.page].unflatten(2, (whole, how.page))
        alike_BKPS = torch.cosine_similarity(k_BKPSH, k_BKPSH.mean(dim=3, keepdim=True), dim=-1)
        alike_BKP = alike_BKPS.amin(dim=-1)
        for row, first in enumerate(firsts):
            alike_BKP[row, :, :first] = torch.inf
        self._held_BKo = alike_BKP.topk(self.num_held, dim=-1, largest=False).indices
        within_S = torch.arange(how.page, device=self._held_BKo.device)
        self.held_slots_BKm = (self._held_BKo[..., None] * how.page + within_S).flatten(2)
        held = [x.take_along_dim(self.held_slots_BKm.unsqueeze(-1), dim=2) for x in (view.k_BKnH, view.v_BKnV)]
        self.held_kv_BKmX = torch.cat(held, dim=-1)

    def leave_out(self, need_BKP: Tensor) -> None:
        need_BKP.scatter_(2, self._held_BKo, -torch.inf)

    @property
    def num_bytes(self) -> int:
        held = self._held_BKo.nbytes + self.held_slots_BKm.nbytes + self.held_kv_BKmX.nbytes
        keys = 0 if self._low_rank is None else self._low_rank.num_bytes + self._new_BKCH.nbytes
        return super().num_bytes + held + keys

    @property
    def scored_bytes(self) -> int:
        return super().num_bytes

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        super().append(k_BKCH, v_BKCV)
        if self._low_rank is not None:
            self._new_BKCH = torch.cat([self._new_BKCH, k_BKCH], dim=2)

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        choice = super().choose(q_BNH, slots)
        if choice is None:
            return None
        slots_BKm = torch.cat([choice.slots_BKm, self.held_slots_BKm], dim=-1)
        return Choice(slots_BKm=slots_BKm, on_device=self.on_device())

    def on_device(self) -> OnDevice:
        """Part of pages and outliers that need not be fetched."""
        return OnDevice(kv_BKoX=self.held_kv_BKmX, keys=None if self._low_rank is None else self._keys)

    def _keys(self, slots_BKm: Tensor) -> Tensor:
        """Keys (B, K, m, H) of some slots: of the prompt rebuilt, of later tokens exact."""
        assert self._low_rank is not None
        num_prompt, num_new = self._low_rank.num_slots, self._new_BKCH.shape[2]
        k_BKmH = self._low_rank.keys(slots_BKm.clamp_max(num_prompt - 1))
        if num_new == 0:
            return k_BKmH
        at_BKm1 = (slots_BKm - num_prompt).unsqueeze(-1)
        new_BKmH = self._new_BKCH.take_along_dim(at_BKm1.clamp_min(0), dim=2)
        return torch.where(at_BKm1 >= 0, new_BKmH, k_BKmH)


@dataclass(kw_only=True)
class ShadowKV(Quest, name="shadowkv"):
    """Retrieve whole pages, about `fetch` slots in total, of which values alone are fetched; outliers come on top.

    Attributes:
        outliers: pages of each KV head whose keys are least similar to their mean, which stay on the device.
        rank: of the prompt's keys on the device; null fetches keys, too.

    Raises:
        ValueError: an option is out of range.
    """

    index_class = ShadowPages
    index_asks_device: ClassVar[bool] = True

    group: Group = Group.max
    first_layer: int = 0
    page: int = 8
    recent: int = 32
    digest: Digest = Digest.mean
    outliers: int = 48
    rank: int | None = 160

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, outliers=0)
        reason = "does not go with shadowkv, whose pages are of one size; use quest"
        require(not self.needs_surprise, "events.by", self.events.by.value, reason)
        require(self.rank is None or self.rank >= 1, "rank", self.rank, "must be at least 1")
        require(self.late is None, "late", self.late, "does not go with shadowkv, whose keys are on the device")
