"""The limit of a pool: which tokens are dropped after a prompt, and which one a generated token replaces."""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, m chosen ones, e dropped ones, H key dim,
# V value dim.

from __future__ import annotations

import torch
from torch import Tensor

from policies.pool import Victim, note_choice, victims
from policies.retriever import Retriever, Slots
from runahead.cache.kept import KeptLayer
from runahead.model.model import Model
from runahead.retrieval.layer import LayerRetrieval

SIMULATED_STEPS = 32
"""Last tokens of a prompt whose queries count as decoding steps in the use statistics of a pool with a limit."""


def num_simulated(policy: Retriever) -> int:
    """Last tokens of a prompt on whose queries the first choice of a full pool's victims depends."""
    return 0 if policy.pool.bytes is None or policy.pool.victim is Victim.fifo else SIMULATED_STEPS


def check_pool(policy: Retriever, model: Model, batch: int) -> None:
    """Check that the pool of a policy has room for the tokens of a batch that always stay. Raises: ValueError."""
    if policy.pool.bytes is None:
        return
    layers = enumerate(zip(model.kv_shapes, model.rules, strict=True))
    shapes = [shape for layer, (shape, rule) in layers if rule is None and policy.retrieves_in(layer)]
    PoolLimit(policy, max(1, sum(shape.bytes_per_token(batch) for shape in shapes)))


class PoolLimit:
    """Limit of the slots of each layer in a pool of `policy.pool.bytes`.

    Args:
        slot_bytes: bytes of one slot of all layers that retrieve.

    Attributes:
        max_slots: most slots of a layer.

    Raises:
        ValueError: there is no room for the tokens that always stay.
    """

    def __init__(self, policy: Retriever, slot_bytes: int) -> None:
        self._policy = policy
        self.max_slots, least = policy.pool.bytes // slot_bytes, policy.sinks + policy.recent + 1
        if self.max_slots < least:
            raise ValueError(
                f"policy.pool.bytes={policy.pool.bytes} holds {self.max_slots} tokens of each layer, fewer than "
                f"sink and recent tokens take; use at least {least * slot_bytes}"
            )

    def room(self, kept: KeptLayer) -> int:
        """Slots that a layer may still be given."""
        return max(0, self.max_slots - kept.num_slots)

    def grow(self, kept: KeptLayer) -> None:
        """Give a layer that is not full memory for a new token, but never for more slots than the limit."""
        if kept.num_slots == kept.slab_TBKX.shape[0]:
            kept.copy_out(room=min(1 + kept.num_slots // 8, self.room(kept)))

    def note_choice(self, kept: KeptLayer, slots_BKm: Tensor, step: int) -> None:
        """Record that slots were chosen in a decoding step; the first is 1."""
        note_choice(self._policy.pool.victim, self._use_of(kept), slots_BKm, SIMULATED_STEPS + step)

    def cut_back(self, found: LayerRetrieval, kept: KeptLayer, q_BNCH: Tensor, slots: Slots) -> None:
        """Drop tokens for which there is no room, by how the prompt's last queries would have used them.

        Args:
            q_BNCH: queries of given tokens, the last ones stored.
            slots: those of the layer, for the token after them.
        """
        victim, num_new = self._policy.pool.victim, q_BNCH.shape[2]
        if self._policy.state_key not in kept.carried:
            shape = len(kept.pads), kept.shape.num_kv_heads, kept.num_slots
            kept.carry(torch.zeros(shape, dtype=torch.int32, device=q_BNCH.device), self._policy.state_key)
        use_BKn = self._use_of(kept)
        simulated = min(num_simulated(self._policy), num_new)
        for step, token in enumerate(range(num_new - simulated, num_new), start=1):
            choice = found.index.choose(q_BNCH[:, :, token], slots)
            if choice is not None:
                note_choice(victim, use_BKn, choice.slots_BKm, step)
        excess = kept.num_slots - self.max_slots
        if excess <= 0:
            return
        assert slots.next_B is not None
        gone_BKe = self._victims(kept, excess, slots.next_B)
        stays_BKn = torch.ones(use_BKn.shape, dtype=torch.bool, device=use_BKn.device).scatter_(2, gone_BKe, False)
        slots_BKm = stays_BKn.nonzero()[:, 2].view(*stays_BKn.shape[:2], self.max_slots)
        kept.keep(slots_BKm, room=0)
        kept.alike = False
        found.index.keep(slots_BKm, *kept.slab().read(0, self.max_slots))
        found.evicted += excess

    def replace(
        self, found: LayerRetrieval, kept: KeptLayer, k_BK1H: Tensor, v_BK1V: Tensor, positions_B1: Tensor
    ) -> None:
        """Store a generated token of each row in place of another one."""
        slots_BK = self._victims(kept, 1, positions_B1[:, 0] + 1)[..., 0]
        kept.overwrite(slots_BK, k_BK1H, v_BK1V, positions_B1)
        found.index.overwrite(slots_BK, k_BK1H[:, :, 0], v_BK1V[:, :, 0])
        found.evicted, found.out_of_order = found.evicted + 1, True

    def _victims(self, kept: KeptLayer, count: int, next_B: Tensor) -> Tensor:
        """The `count` slots (B, K, count) of each row and KV head to replace or drop."""
        sinks, keep_from_B = self._policy.sinks, next_B - self._policy.recent
        victim, positions_BKn = self._policy.pool.victim, kept.positions_BKn()
        return victims(victim, self._use_of(kept), positions_BKn, count, sinks=sinks, keep_from_B=keep_from_B)

    def _use_of(self, kept: KeptLayer) -> Tensor:
        """Use statistics (B, K, n) of the slots of a layer in a limited pool, as the policy carries them along."""
        use_BKn = kept.carried_BKn(self._policy.state_key)
        assert use_BKn is not None
        return use_BKn
