"""MagicPIG (Chen et al., ICLR 2025, arXiv 2410.16179): sample tokens by hashes of keys, and correct their weights.

Each of `tables` hash functions has the signs of `bits` random projections (SimHash). A query head samples the tokens
whose keys, less the mean of the prompt's keys, have the query's hash in two functions or more. At an angle theta a bit
agrees with probability p = 1 - theta / pi, so a token is sampled with probability w = 1 - (1 - p^K)^L - L p^K (1 -
p^K)^(L - 1) for K bits and L functions, and weighs exp(q k / sqrt(d)) / w. Sums of weights and of weighted values are
right on average over `seed`; their ratio, the output, is not quite. Sinks and recent tokens are read as they are.

The number of sampled tokens varies, and the host asks for it. With `fetch`, which the paper has not, no more are read:
of more a KV head takes a random part, whose weights grow by as much. Its query heads share what is read, each with the
tokens that it has sampled. Generated tokens are hashed, too (published code leaves them out, in a window that grows),
with the prompt's mean. Functions are drawn for each layer, by the seed. Published code adds 1e-4 to w. Hashes are
compared with the query's one by one, on the device, where the paper looks them up in tables of a CPU.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, m chosen ones, C new tokens, T slots with room, H key
# dim, V value dim, L hash functions, P bits of all of them.

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from policies.base import Budget, require, require_least
from policies.retriever import Choice, Group, Index, PromptView, Retriever, Slots, most_needed
from policies.row_values import row_values, sent

LEAST = 2
"""Hash functions in which a key has to agree with a query to be sampled."""
PART = 1024
"""Keys that are hashed, or whose hashes are compared, at once."""


def sampling_log_probability(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """Log of the probability that vectors at an angle have the same hash in at least `LEAST` functions; in float64.

    A sum of positive terms, the probabilities of each number of functions, so that small ones are exact, too.
    """
    agrees = 1 - cosine.double().clamp(-1, 1).acos() / math.pi
    log_x = bits * agrees.clamp_min(torch.finfo(torch.float64).tiny).log()
    log_rest = torch.log1p(-log_x.exp().clamp_max(1 - 1e-16))
    numbers_L = torch.arange(LEAST, tables + 1, dtype=torch.float64, device=cosine.device)
    log_ways_L = math.lgamma(tables + 1) - torch.lgamma(numbers_L + 1) - torch.lgamma(tables - numbers_L + 1)
    terms = log_ways_L + numbers_L * log_x.unsqueeze(-1) + (tables - numbers_L) * log_rest.unsqueeze(-1)
    return terms.logsumexp(dim=-1).clamp_max_(0.0)


class Hashes(Index):
    """Hashes of the keys of all slots.

    Args:
        view: the layer after the prompt.
        bits: of a hash function.
        tables: number of these.
        seed: of their projections, and of which of too many sampled tokens are read.
    """

    def __init__(self, view: PromptView, *, bits: int, tables: int, seed: int) -> None:
        super().__init__(0)
        self.bits, self.tables, self._seed = bits, tables, seed
        k_BKnH = view.k_BKnH
        self._wide = torch.promote_types(k_BKnH.dtype, torch.float32)
        draw = torch.Generator().manual_seed(seed * 1_000_003 + view.layer)
        planes_HP = torch.randn(k_BKnH.shape[3], bits * tables, generator=draw)
        self._planes_HP = sent(planes_HP.to(self._wide), k_BKnH.device)
        self._powers = 2 ** torch.arange(bits, dtype=torch.int16, device=k_BKnH.device)
        is_token_B1n1 = (view.positions_BKn[:, :1] >= 0).unsqueeze(3).to(self._wide)
        count_B111 = is_token_B1n1.sum(dim=2, keepdim=True).clamp_min(1)  # a rank may have no token of a row
        self._mean_BK1H = (k_BKnH * is_token_B1n1).sum(dim=2, keepdim=True) / count_B111
        self._codes_BKTL = self._powers.new_empty(*k_BKnH.shape[:2], k_BKnH.shape[2] + view.room, tables)
        self.append(k_BKnH, view.v_BKnV)

    @property
    def num_kv_heads(self) -> int:
        return self._codes_BKTL.shape[1]

    @property
    def num_bytes(self) -> int:
        return self._codes_BKTL.nbytes + self._planes_HP.nbytes + self._mean_BK1H.nbytes

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        end = self.num_slots + k_BKCH.shape[2]
        if end > self._codes_BKTL.shape[2]:
            old = self._codes_BKTL
            self._codes_BKTL = old.new_empty(*old.shape[:2], end + end // 8, self.tables)
            self._codes_BKTL[:, :, : self.num_slots] = old[:, :, : self.num_slots]
        for part_BKCH in k_BKCH.split(PART, dim=2):
            stop = self.num_slots + part_BKCH.shape[2]
            self._codes_BKTL[:, :, self.num_slots : stop] = self._hashed(self.centred(part_BKCH))
            self.num_slots = stop

    def keep(self, slots_BKm: Tensor, k_BKmH: Tensor, v_BKmV: Tensor) -> None:
        self._codes_BKTL = self._codes_BKTL.take_along_dim(slots_BKm.unsqueeze(3), dim=2)
        self.num_slots = slots_BKm.shape[2]

    def overwrite(self, slots_BK: Tensor, k_BKH: Tensor, v_BKV: Tensor) -> None:
        codes_BK1L = self._hashed(self.centred(k_BKH.unsqueeze(2)))
        self._codes_BKTL.scatter_(2, slots_BK[:, :, None, None].expand_as(codes_BK1L), codes_BK1L)

    def fork(self, stored: Callable[[], Tensor]) -> Hashes:
        other = copy.copy(self)
        other._codes_BKTL = self._codes_BKTL[:, :, : self.num_slots].clone()
        return other

    def centred(self, k_BKnH: Tensor) -> Tensor:
        """Keys less the mean of the prompt's, which changes no probability of attention."""
        return k_BKnH.to(self._wide) - self._mean_BK1H

    def _hashed(self, x_BKnH: Tensor) -> Tensor:
        """Hashes (B, K, n, L), int16, of vectors."""
        is_set = (x_BKnH.to(self._wide) @ self._planes_HP > 0).unflatten(3, (self.tables, self.bits))
        return (is_set * self._powers).sum(dim=4, dtype=torch.int16)

    def samples(self, q_BKGH: Tensor) -> Tensor:
        """Which slots (B, K, G, n) each query samples."""
        asked_BKGL = self._hashed(q_BKGH)
        found = list[Tensor]()
        for codes_BKtL in self._codes_BKTL[:, :, : self.num_slots].split(PART, dim=2):
            of_heads = [
                (codes_BKtL == asked_BK1L).sum(dim=3, dtype=torch.int16) >= LEAST
                for asked_BK1L in asked_BKGL.split(1, dim=2)
            ]
            found.append(torch.stack(of_heads, dim=2))
        return torch.cat(found, dim=3)

    def lots(self, positions_BKn: Tensor, next_B: Tensor) -> Tensor:
        """Random numbers in [0, 1) by the positions of tokens, drawn anew for each next position."""
        x = positions_BKn.long() * 0x9E3779B1 + next_B.long()[:, None, None] * 0x85EBCA6B + self._seed * 0xC2B2AE3D
        for _ in range(2):  # of the bits that are kept each depends on all
            x = ((x ^ (x >> 15)) & 0xFFFFFFFF) * 0x2C1B3C6D
        return ((x >> 8) & 0xFFFFFF).double() / (1 << 24)


@dataclass(kw_only=True)
class MagicPIG(Retriever, name="magicpig"):
    """Sample the tokens whose keys have hashes of the query's, and weigh them by the inverse of the probability.

    Attributes:
        bits: K, of a hash function.
        tables: L, number of hash functions.
        dense_every: of this many layers the first attends to all tokens; 0: none does.
        seed: of the hash functions.

    Raises:
        ValueError: an option is out of range.
    """

    first_layer: int = 0
    recent: int = 64
    bits: int = 10
    tables: int = 150
    dense_every: int = 16
    fetch: Budget | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, bits=1, tables=LEAST, dense_every=0, seed=0)
        require(self.bits <= 14, "bits", self.bits, "must be at most 14")
        require(self.tables <= 10_000, "tables", self.tables, "must be at most 10000")
        reason = "does not choose for query heads, each of which samples; leave it out"
        require(self.group is Group.union, "group", self.group.name, reason)

    @property
    def estimates_rest(self) -> bool:
        return True  # what is sampled stands for all other tokens, by the query that has sampled it

    def retrieves_in(self, layer: int) -> bool:
        return super().retrieves_in(layer) and not (self.dense_every and layer % self.dense_every == 0)

    def index(self, view: PromptView) -> Hashes:
        return Hashes(view, bits=self.bits, tables=self.tables, seed=self.seed)

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Choice | None:
        assert isinstance(index, Hashes)
        num_chosen = None if self.fetch is None else self.num_chosen(slots)
        if num_chosen == slots.num_slots:
            return None
        q_BKGH = q_BNH.unflatten(1, (index.num_kv_heads, -1))
        sampled_BKGn = index.samples(q_BKGH)
        positions_BKn, next_B = slots.positions_BKn, slots.next_B
        if positions_BKn is None or next_B is None:
            pads_B = row_values(slots.pads, q_BNH.device)
            next_B = slots.num_slots - pads_B
            positions_BKn = (torch.arange(slots.num_slots, device=q_BNH.device) - pads_B[:, None])[:, None]
        need_BKn = sampled_BKGn.any(dim=2) * (1 + index.lots(positions_BKn, next_B))
        slots.mark(need_BKn, sinks=self.sinks, recent=self.recent)
        is_token_BKn = need_BKn > -math.inf
        sampled_BKGn &= is_token_BKn.unsqueeze(2)
        if num_chosen is not None:  # of few tokens all are read
            has_room_BK1 = is_token_BKn.sum(dim=-1, keepdim=True) <= num_chosen
            need_BKn.masked_fill_(is_token_BKn & has_room_BK1, math.inf)
        always_BKn = need_BKn == math.inf
        num_wanted_BK1 = (need_BKn > 0).sum(dim=-1, keepdim=True)
        growth_BK1 = torch.zeros_like(num_wanted_BK1, dtype=torch.float64)
        if num_chosen is None:
            slots.await_device()
            num_chosen = max(1, int(num_wanted_BK1.max()))
        else:
            num_always_BK1 = always_BKn.sum(dim=-1, keepdim=True)
            wanted, room = num_wanted_BK1 - num_always_BK1, num_chosen - num_always_BK1
            growth_BK1 = (wanted.double() / room.clamp_min(1)).clamp_min(1).log()
        choice = most_needed(need_BKn, num_chosen, slots)
        if choice is None:
            every_n = torch.arange(slots.num_slots, device=need_BKn.device)
            choice = Choice(slots_BKm=every_n.expand(need_BKn.shape))
        weigh = partial(self._log_weights, index, q_BKGH, sampled_BKGn, always_BKn, growth_BK1)
        return Choice(slots_BKm=choice.slots_BKm, weigh=weigh)

    def _log_weights(
        self,
        index: Hashes,
        q_BKGH: Tensor,
        sampled_BKGn: Tensor,
        always_BKn: Tensor,
        growth_BK1: Tensor,
        slots_BKm: Tensor,
        k_BKmH: Tensor,
    ) -> Tensor:
        """Log weights (B, N, m) of chosen slots: 0 of those that are always read, -inf of those that were not sampled.

        Args:
            growth_BK1: log of how many times as many were sampled as are read.
        """
        cosine_BKGm = torch.nn.functional.normalize(q_BKGH.to(k_BKmH.dtype).double(), dim=-1) @ (
            torch.nn.functional.normalize(index.centred(k_BKmH).double(), dim=-1).transpose(-1, -2)
        )
        log_BKGm = growth_BK1.unsqueeze(2) - sampling_log_probability(cosine_BKGm, self.bits, self.tables)
        is_sampled_BKGm = sampled_BKGn.take_along_dim(slots_BKm.unsqueeze(2), dim=3)
        log_BKGm = log_BKGm.masked_fill(~is_sampled_BKGm, -math.inf)
        return log_BKGm.masked_fill(always_BKn.take_along_dim(slots_BKm, dim=2).unsqueeze(2), 0.0).flatten(1, 2)
