"""Host pool of a retrieving policy: its size limit, and the token that a new one replaces (InfiniGen, Sec. 4.4)."""

# Legend: B batch, K kv heads, n slots, m chosen ones.

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from policies.byte_size import num_bytes
from policies.options import choice

SATURATED = 255
"""Value of a counter at which all counters of its row and KV head are halved."""


class Victim(Enum):
    """Token that is replaced: the oldest one, the one chosen longest ago, or the one chosen least often."""

    fifo = "fifo"
    lru = "lru"
    counter = "counter"


@dataclass(kw_only=True)
class Pool:
    """Options of the host pool.

    Attributes:
        bytes: limit for the keys and values of the layers that retrieve, such as 2GiB; None is no limit.
        victim: token that is replaced in a full pool.

    Raises:
        ValueError: an invalid size or victim, or a victim for a pool that is never full.
    """

    bytes: Any = None
    victim: Victim = Victim.counter

    def __post_init__(self) -> None:
        self.victim = choice("pool.victim", Victim, self.victim)
        if self.bytes is not None:
            self.bytes = num_bytes(self.bytes, "policy.pool.bytes")
        elif self.victim is not Victim.counter:
            raise ValueError(
                f"policy.pool.victim={self.victim.value} is the token that a full pool replaces, and without a limit "
                "none is full; set policy.pool.bytes, such as 2GiB, or leave policy.pool.victim out"
            )


def note_choice(victim: Victim, use_BKn: Tensor, slots_BKm: Tensor, step: int) -> None:
    """Record in `use_BKn`, the usage statistics of all slots, that these slots were chosen in a step."""
    if victim is Victim.lru:
        use_BKn.scatter_(2, slots_BKm, step)
    elif victim is Victim.counter:
        use_BKn.scatter_add_(2, slots_BKm, use_BKn.new_ones(()).expand(slots_BKm.shape))
        saturated_BK1 = use_BKn.amax(dim=2, keepdim=True) >= SATURATED
        use_BKn.copy_(torch.where(saturated_BK1, use_BKn // 2, use_BKn))


def victims(
    victim: Victim, use_BKn: Tensor, positions_BKn: Tensor, count: int, *, sinks: int, keep_from_B: Tensor
) -> Tensor:
    """Slots (B, K, count) to replace, in order: padding, then tokens by use, and of equal ones the older.

    Args:
        victim: which token is replaced.
        use_BKn: usage statistics as `note_choice` recorded them.
        positions_BKn: positions of the slots' tokens, below 0 on padding.
        count: number of slots.
        sinks: first tokens that stay.
        keep_from_B: position in each row from which on tokens stay.
    """
    positions_BKn = positions_BKn.expand(use_BKn.shape).long()
    age_BKn = positions_BKn if victim is Victim.fifo else (use_BKn.long() << 32) + positions_BKn
    stays = (positions_BKn < sinks) | (positions_BKn >= keep_from_B[:, None, None])
    last = torch.iinfo(torch.int64).max
    order_BKn = age_BKn.masked_fill(stays, last)
    # The last padding slot is replaced first, so that the remaining padding stays on the left.
    order_BKn = torch.where(positions_BKn < 0, -last - positions_BKn, order_BKn)
    chosen = order_BKn.topk(count, dim=-1, largest=False, sorted=True)
    torch._assert_async((chosen.values < last).all(), "no slot may go")  # the host does not wait for the GPU
    return chosen.indices
