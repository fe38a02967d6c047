"""MagicPIG (Chen et al., ICLR 2025, arXiv 2410.16179): sample tokens by hashes of keys, and correct their weights.

Each of `tables` hash functions has the signs of `bits` random projections (SimHash). A query head samples the tokens
whose keys, less the mean of the prompt's keys, have the query's hash in two functions or more. At an angle theta a bit
agrees with probability p = 1 - theta / pi, so a token is sampled with probability w = 1 - (1 - p^K)^L - L p^K (1 -
p^K)^(L - 1) for K bits and L functions, and weighs exp(q k / sqrt(d)) / w. Sums of weights and of weighted values are
right on average over `seed`; their ratio, the output, is not quite. Sinks and recent tokens are read as they are.

The number of sampled tokens varies, and the host asks for it. With `fetch`, which the paper has not, no more are read:
of more a KV head takes a random part, drawn anew for each layer and next token, whose weights grow by as much. Its
query heads share what is read, each with the tokens that it has sampled. Generated tokens are hashed, too (published
code leaves them out, in a window that grows), with the prompt's mean. Functions are drawn for each layer, by the seed.
Published code adds 1e-4 to w. Hashes are compared with the query's one by one, on the device, where the paper looks
them up in tables of a CPU.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, t some of them, m chosen ones, C new tokens, H key
# dim, L hash functions, b bits of one, P bits of all.

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from policies.columns import PART, Columns
from policies.gumbel import MASK, hashed
from policies.options import Budget, require, require_least
from policies.retriever import Choice, Group, PromptView, Retriever, Slots, most_needed
from policies.row_values import row_values, sent

LEAST = 2
"""Hash functions in which a key has to agree with a query to be sampled."""
FAR_APART = 0x9E3779B1
"""Distance, modulo 2^32, of the numbers that are hashed for a next token from those for the one after it."""


def sampling_probability(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """Probability, float64, above 0, that vectors at an angle have the same hash in at least `LEAST` functions."""
    x = (1 - cosine.double().clamp(-1, 1).acos() / math.pi) ** bits
    in_any = -torch.expm1(tables * torch.log1p(-x))
    in_one = tables * x * (1 - x) ** (tables - 1)
    return (in_any - in_one).clamp_min(torch.finfo(torch.float64).tiny)


class Hashes(Columns):
    """Index of the hashes of all keys, a column for each hash function."""

    how: MagicPIG

    def __init__(self, view: PromptView, how: MagicPIG) -> None:
        k_BKnH, self.layer = view.k_BKnH, view.layer
        wide = torch.promote_types(k_BKnH.dtype, torch.float32)
        draw = torch.Generator().manual_seed(how.seed * 1_000_003 + view.layer)
        planes_HP = torch.randn(k_BKnH.shape[3], how.bits * how.tables, generator=draw)
        self._planes_HP = sent(planes_HP.to(wide), k_BKnH.device)
        self._powers_b = 2 ** torch.arange(how.bits, dtype=torch.int16, device=k_BKnH.device)
        is_token_B1n1 = (view.positions_BKn[:, :1] >= 0).unsqueeze(3)
        count_B111 = is_token_B1n1.sum(dim=2, keepdim=True).clamp_min(1)  # a rank may have no token of a row
        self._mean_BK1H = (k_BKnH * is_token_B1n1).sum(dim=2, keepdim=True, dtype=wide) / count_B111
        super().__init__(view, how)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._planes_HP.nbytes + self._mean_BK1H.nbytes

    def centred(self, k_BKnH: Tensor) -> Tensor:
        """Keys less the mean of the prompt's, which changes no probability of attention."""
        return k_BKnH - self._mean_BK1H

    def columns(self, k_BKCH: Tensor) -> Tensor:
        return self._hashes(self.centred(k_BKCH)).mT

    def _hashes(self, x_BKnH: Tensor) -> Tensor:
        """Hashes (B, K, n, L), int16, of vectors."""
        is_set = (x_BKnH.to(self._planes_HP.dtype) @ self._planes_HP > 0).unflatten(3, (-1, len(self._powers_b)))
        return (is_set * self._powers_b).sum(dim=4, dtype=torch.int16)

    def samples(self, q_BNH: Tensor) -> Tensor:
        """Which slots (B, K, G, n) each query samples."""
        asked_BKGL1 = self._hashes(q_BNH.unflatten(1, (self._mean_BK1H.shape[1], -1))).unsqueeze(4)
        part = max(1, PART // asked_BKGL1.shape[2])
        num_same = [
            (codes_BKLt.unsqueeze(2) == asked_BKGL1).sum(dim=3, dtype=torch.int16)
            for codes_BKLt in self._columns_BKrT[..., : self.num_slots].split(part, dim=3)
        ]
        return torch.cat(num_same, dim=3) >= LEAST

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        how = self.how
        num_chosen = None if how.fetch is None else how.num_chosen(slots)
        if num_chosen == slots.num_slots:
            return None
        sampled_BKGn = self.samples(q_BNH)
        need_BKn = sampled_BKGn.any(dim=2) * (1 + self._lots(slots, q_BNH.device)).double()
        slots.mark(need_BKn, how)
        if num_chosen is None:
            slots.await_device()
            num_chosen = max(1, int((need_BKn > 0).sum(dim=-1).max()))
        else:  # of few tokens all are read
            is_token_BKn = need_BKn > -math.inf
            is_few_BK1 = is_token_BKn.sum(dim=-1, keepdim=True) <= num_chosen
            need_BKn.masked_fill_(is_token_BKn & is_few_BK1, math.inf)
        choice = most_needed(need_BKn, num_chosen, slots)
        if choice is None:
            choice = Choice(slots_BKm=torch.arange(slots.num_slots, device=q_BNH.device).expand(need_BKn.shape))

        def weigh(slots_BKm: Tensor, k_BKmH: Tensor) -> Tensor:
            """Log weights of sampled slots; 0 of those that are always read, -inf of those that were not sampled."""
            need_BKm = need_BKn.take_along_dim(slots_BKm, dim=2)
            num_sampled, num_read = (((x > 0) & (x < math.inf)).sum(dim=-1) for x in (need_BKn, need_BKm))
            growth_BK11 = (num_sampled.double() / num_read.clamp_min(1))[..., None, None]
            q_BKGH = q_BNH.unflatten(1, (k_BKmH.shape[1], -1)).double()
            cosine_BKGm = normalize(q_BKGH, dim=-1) @ normalize(self.centred(k_BKmH).double(), dim=-1).mT
            log_BKGm = (growth_BK11 / sampling_probability(cosine_BKGm, how.bits, how.tables)).log()
            is_sampled_BKGm = sampled_BKGn.take_along_dim(slots_BKm.unsqueeze(2), dim=3)
            log_BKGm.masked_fill_(~is_sampled_BKGm | (need_BKm <= 0).unsqueeze(2), -math.inf)  # padding may have been
            return log_BKGm.masked_fill_((need_BKm == math.inf).unsqueeze(2), 0.0).flatten(1, 2)

        return replace(choice, weigh=weigh)

    def _lots(self, slots: Slots, device: torch.device) -> Tensor:
        """Random numbers (B, K, n) below 2^32, or (n) for all alike, by layer, next token and distance to it."""
        num = slots.num_slots
        if slots.positions_BKn is not None and slots.next_B is not None:
            next_B11 = slots.next_B[:, None, None]
            numbers_BKn = next_B11 * FAR_APART + (next_B11 - slots.positions_BKn)
        else:
            first, *others = firsts = [(num - pad) * FAR_APART & MASK for pad in slots.pads]
            if all(other == first for other in others):
                numbers_BKn = torch.arange(first + num, first, -1, device=device)
            else:
                numbers_BKn = row_values(firsts, device)[:, None, None] + torch.arange(num, 0, -1, device=device)
        return hashed(hashed(hashed(self.how.seed & MASK) ^ self.layer) ^ (numbers_BKn & MASK))


@dataclass(kw_only=True)
class MagicPIG(Retriever, name="magicpig"):
    """Sample the tokens whose keys have hashes of the query's, and weigh them by the inverse of the probability.

    Attributes:
        bits: K, of a hash function.
        tables: L, number of hash functions.
        dense_every: of this many layers the first attends to all tokens; 0: none does.
        seed: of the hash functions, and of which of too many sampled tokens are read.

    Raises:
        ValueError: an option is out of range.
    """

    index_class = Hashes

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
