"""Retrieval while decoding: which of a layer's tokens attention sees, chosen by an index that is made after the prompt.

On a GPU choosing runs on the compute stream; with predicted queries it is a layer ahead of the attention that needs
what is chosen.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, C new tokens, n stored slots, m chosen ones, w observed tokens,
# T slots with room, H key dim, V value dim, X = H + V.

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from policies.pool import Victim, note_choice, victims
from policies.retriever import DECODED_SOON, FEW_TOKENS, Index, PromptView, Retriever, Slots
from runahead.attention.base import LayerInput
from runahead.attention.partial import AttentionTerms
from runahead.cache.copy_stream import copies_for
from runahead.cache.host_layer import HostLayer
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.model.model import Model
from runahead.model.query_prediction import FoldedProjection
from runahead.report import RetrievalReport
from runahead.retrieval.fetched import Fetched, Gather

REMEMBERED_EVERY = 4
"""Of the queries that an index was made of, every how many-th is kept to make it anew."""
SIMULATED_STEPS = 32
"""Last tokens of a prompt whose queries count as steps, where a limited pool has to know how its slots are used."""


@dataclass(kw_only=True)
class LayerRetrieval:
    """One layer's index, and what was retrieved so far.

    Attributes:
        folded: predicts queries in the index's basis, where that can be.
        observed_BNoH: some of the queries that the index was made of, as they stand where it is good for; None where
            it is not made of queries.
        scaling: of this layer's scores.
        age: tokens that came since.
        steps: for which something was chosen.
        fetched, resident: slots, summed over steps.
        evicted: slots of each row and KV head whose token was given up.
        hit_mass: attention probability of what was chosen, in the steps that were sampled.
        out_of_order: a slot has been overwritten.
    """

    index: Index
    folded: FoldedProjection | None = None
    observed_BNoH: Tensor | None = None
    scaling: float = 1.0
    age: int = 0
    steps: int = 0
    fetched: int = 0
    resident: int = 0
    evicted: int = 0
    hit_mass: list[float] = field(default_factory=list)
    out_of_order: bool = False


class Retrieval:
    """Indices of a sequence batch, and what is on its way for the next layers.

    Args:
        cache: whose layers are the pool.

    Raises:
        ValueError: the pool's limit has no room for what always stays, or the model does not let queries be predicted.
    """

    def __init__(self, policy: Retriever, model: Model, cache: KeptCache, *, batch: int) -> None:
        self.policy, self.cache = policy, cache
        self.layers: list[LayerRetrieval | None] = [None] * model.num_layers
        self._prediction = model.query_prediction if policy.looks_ahead_on(model.device) else None
        self._rotaries = model.known_rotaries
        self._fetched: dict[int, Fetched | None] = {}
        self._copies = copies_for(model.device)
        few = FEW_TOKENS if self._copies is None else 0
        self._min_tokens = few if policy.min_tokens is None else policy.min_tokens
        self._gather = Gather()
        self._pads: tuple[list[int], Tensor] | None = None
        self.in_pool = [
            layer >= policy.first_layer and (rule is None or rule.sees_everything)
            for layer, rule in enumerate(model.rules)
        ]
        """Which layers retrieve. The others are read whole in every step, so their K,V stay on the device."""
        self.max_slots: int | None = None
        """Of each layer that retrieves."""
        self.peak_fetched_bytes = 0
        """Of what was fetched for layers that had not read it yet."""
        if policy.pool.bytes is not None:
            retrieving = zip(model.kv_shapes, self.in_pool, strict=True)
            per_slot = max(1, sum(shape.bytes_per_token(batch) for shape, is_in in retrieving if is_in))
            self.max_slots, least = policy.pool.bytes // per_slot, policy.sinks + policy.recent + 1
            if self.max_slots < least:
                raise ValueError(
                    f"policy.pool.bytes={policy.pool.bytes} holds {self.max_slots} tokens of each layer, fewer than "
                    f"sink and recent tokens take; use at least {least * per_slot}"
                )

    @property
    def num_bytes(self) -> int:
        """Of the indices, with folded projections and what they are made anew of, and the most fetched at a time."""
        layers = [layer for layer in self.layers if layer is not None]
        folded = sum(layer.folded.num_bytes for layer in layers if layer.folded is not None)
        observed = sum(layer.observed_BNoH.nbytes for layer in layers if layer.observed_BNoH is not None)
        return sum(layer.index.num_bytes for layer in layers) + folded + observed + self.peak_fetched_bytes

    def fork(self, cache: KeptCache) -> Retrieval:
        """One that goes on from here on its own, over another cache with the same slots."""
        other = copy.copy(self)
        other.cache, other._fetched = cache, {}
        other.layers = [None if layer is None else copy.copy(layer) for layer in self.layers]
        for number, layer in enumerate(other.layers):
            if layer is not None:
                layer.index = layer.index.fork(partial(other._keys, number))
                layer.hit_mass = list(layer.hit_mass)
        return other

    def store_prompt(
        self,
        layer: int,
        kept: KeptLayer,
        q_BNCH: Tensor,
        positions_BC: Tensor,
        terms: AttentionTerms,
        *,
        room: int,
        was_cut: bool,
    ) -> None:
        """Take in a layer behind the attention of new tokens, whose slots are the last ones.

        Args:
            was_cut: slots before them are not those of the last time.
        """
        if layer < self.policy.first_layer:
            return
        found = self.layers[layer]
        k_BKnH, _ = kept.slab().read(kept.first, kept.end)
        if found is not None and not was_cut and q_BNCH.shape[2] < self.policy.observed:
            found.index.append(k_BKnH[:, :, found.index.num_slots :])
            found.age += q_BNCH.shape[2]
        else:
            q_BNwH = self._observed(layer, q_BNCH, positions_BC)
            self._make_index(layer, kept, k_BKnH, q_BNwH, positions_BC[:, -1] + 1, terms.scaling, room=room)
        if self.max_slots is not None:
            self._limit_prompt(layer, kept, q_BNCH, positions_BC)

    def _make_index(
        self,
        layer: int,
        kept: KeptLayer,
        k_BKnH: Tensor,
        q_BNwH: Tensor,
        next_B: Tensor,
        scaling: float,
        *,
        room: int,
    ) -> None:
        """An index of these keys for queries like these, which stand behind them."""
        view = PromptView(
            layer=layer,
            num_layers=len(self.layers),
            q_BNwH=q_BNwH,
            k_BKnH=k_BKnH,
            scaling=scaling,
            pads=list(kept.pads),
            next_B=next_B,
            turn=None if self._rotaries is None else self._rotaries[layer].turned,
            room=room,
            stored=partial(self._keys, layer),
        )
        index, found = self.policy.index(view), self.layers[layer]
        if found is None:
            found = self.layers[layer] = LayerRetrieval(index=index)
        found.index, found.folded, found.scaling, found.age = index, self._folded(layer, index), scaling, 0
        if self.policy.observed and self._rotaries is not None:
            some_BNoH = q_BNwH[:, :, ::REMEMBERED_EVERY] if q_BNwH.shape[2] == self.policy.observed else q_BNwH
            found.observed_BNoH = some_BNoH.clone()

    def _renew_if_old(self, layer: int, start: int, pads: Sequence[int]) -> None:
        """Make an index anew for the positions that decoding has come to: rotations have taken queries elsewhere.

        Layers take turns, so that no step makes all of them.
        """
        found, kept = self.layers[layer], self.cache.layers[layer]
        assert found is not None
        if found.observed_BNoH is None or found.age < DECODED_SOON + layer:
            return
        assert self._rotaries is not None
        by_Bo = torch.full_like(found.observed_BNoH[:, 0, :, 0], found.age, dtype=torch.int64)
        q_BNoH = self._rotaries[layer].turned(found.observed_BNoH, by_Bo)
        k_BKnH = self._keys(layer)
        if kept.on_host:
            k_BKnH = k_BKnH.contiguous()  # over the link once, though an index looks at them more than once
        next_B = self._next_positions(start, pads)
        self._make_index(layer, kept, k_BKnH, q_BNoH, next_B, found.scaling, room=DECODED_SOON + layer)

    def settle(self, layer: int, *, room: int) -> None:
        """Move a layer that retrieves to the host, if the device is another one.

        It must not share memory with what is used again. Where no room is asked for nobody knows what comes, and new
        memory has an eighth more, as it has where it grows.
        """
        kept = self.cache.layers[layer]
        if self._copies is not None and self.in_pool[layer] and not kept.on_host:
            spare = room or kept.num_slots // 8
            if self.max_slots is not None:
                most = max(0, self.max_slots - kept.num_slots)
                room, spare = min(room, most), min(spare, most)
            self.cache.layers[layer] = HostLayer.of(kept, self._copies, room=room, spare=spare)

    def look_ahead(self, layer: int, given: LayerInput) -> None:
        """Choose and fetch for a layer, by the input of the layer before it."""
        if self._prediction is None or layer < self.policy.first_ahead or not self._chooses(layer):
            return
        self._renew_if_old(layer, given.start, given.pads)
        found = self.layers[layer]
        assert found is not None
        if not self.policy.asks:
            q_BNH = given.x_BCD
        elif found.folded is not None:
            q_BNH = found.folded.queries(given)
        else:
            q_BNH = self._prediction.queries(layer, given)[:, :, -1]
        self._fetched[layer] = self._fetch(layer, q_BNH, given.start, given.pads)

    def fetched(self, layer: int, q_BNH: Tensor, start: int, pads: Sequence[int]) -> Fetched | None:
        """What attention of a new token is to see of a layer; None is everything."""
        if not self._chooses(layer):
            return None
        if layer not in self._fetched:  # nothing looked ahead: not this policy, or not for the first layers
            self._renew_if_old(layer, start, pads)
            self._fetched[layer] = self._fetch(layer, q_BNH, start, pads)
        held = [each.num_bytes for at, each in self._fetched.items() if each and (at == layer or each.under_way)]
        self.peak_fetched_bytes = max(self.peak_fetched_bytes, sum(held))
        return self._fetched.pop(layer)

    def store_token(self, layer: int, k_BK1H: Tensor, v_BK1V: Tensor, positions_B1: Tensor) -> None:
        """A new token, behind its attention; in a full pool in the place of another."""
        found, kept = self.layers[layer], self.cache.layers[layer]
        if found is not None:
            found.age += 1
        if found is None or self.max_slots is None or kept.num_slots < self.max_slots:
            if self.max_slots is not None and found is not None and kept.num_slots == kept.slab_TBKX.shape[0]:
                kept.copy_out(room=min(1 + kept.num_slots // 8, self.max_slots - kept.num_slots))
            kept.store(k_BK1H, v_BK1V, positions_B1, [0] * len(kept.pads))
            if found is not None and kept.num_slots > self._min_tokens:
                self._index_rest(found.index, kept, k_BK1H)
            return
        use_BKn = kept.carried_BKn()
        assert use_BKn is not None
        slots_BK = self._victims(kept, use_BKn, 1, positions_B1[:, 0] + 1)[..., 0]
        kept.overwrite(slots_BK, k_BK1H, v_BK1V, positions_B1)
        found.index.overwrite(slots_BK, k_BK1H[:, :, 0])
        found.evicted, found.out_of_order = found.evicted + 1, True

    def sample_hits(self, layer: int, q_BNH: Tensor, k_BK1H: Tensor, fetched: Fetched | None, scaling: float) -> None:
        """Note the attention probability of what was fetched, if this is a step to sample."""
        found, every = self.layers[layer], self.policy.sample_every
        if found is None or fetched is None or every == 0 or found.steps % every:
            return
        if fetched.slots_BKm is None:
            found.hit_mass.append(1.0)
            return
        kept, k_BKnH = self.cache.layers[layer], self._keys(layer)
        q_BKGH = q_BNH.unflatten(1, (k_BKnH.shape[1], -1)) * scaling
        scores_BKGn = (q_BKGH @ k_BKnH.transpose(-1, -2)).float()
        for row, pad in enumerate(kept.pads):
            scores_BKGn[row, :, :, :pad] = -torch.inf
        own_BKG1 = (q_BKGH @ k_BK1H.transpose(-1, -2)).float()
        probabilities = torch.cat([scores_BKGn, own_BKG1], dim=-1).softmax(dim=-1)
        slots_BKGm = fetched.slots_BKm[:, :, None].expand(-1, -1, q_BKGH.shape[2], -1)
        seen = probabilities.gather(3, slots_BKGm).sum(dim=-1) + probabilities[..., -1]
        found.hit_mass.append(float(seen.mean()))

    def _folded(self, layer: int, index: Index) -> FoldedProjection | None:
        """Of one row: rows of a batch have bases of their own, and folded weights for each would be more, not less."""
        basis_BKHr = index.query_basis_BKHr
        if self._prediction is None or basis_BKHr is None or basis_BKHr.shape[0] > 1:
            return None
        full = basis_BKHr.shape[3] == basis_BKHr.shape[2]  # nothing to save, and not to be told from plain queries
        return None if full else self._prediction.folded(layer, basis_BKHr[0])

    def _chooses(self, layer: int) -> bool:
        """Does attention see only some of a layer?"""
        if layer >= len(self.layers) or self.layers[layer] is None:
            return False
        return self.cache.layers[layer].num_slots >= self._min_tokens

    def _index_rest(self, index: Index, kept: KeptLayer, k_BK1H: Tensor) -> None:
        """Take in the newest token, and those before it that came while there were too few to choose from."""
        if index.num_slots == kept.num_slots - 1:
            index.append(k_BK1H)
        else:
            index.append(kept.slab().read(kept.first + index.num_slots, kept.end)[0])

    def report(self) -> RetrievalReport:
        return RetrievalReport(
            fetched_share=[
                None if layer is None or layer.resident == 0 else layer.fetched / layer.resident
                for layer in self.layers
            ],
            hit_mass=[
                None if layer is None or not layer.hit_mass else sum(layer.hit_mass) / len(layer.hit_mass)
                for layer in self.layers
            ],
            evicted=[0 if layer is None else layer.evicted for layer in self.layers],
            host_bytes=self.host_bytes,
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of keys and values in the host's pool. On a CPU that is memory like any other."""
        layers = zip(self.cache.layers, self.in_pool, strict=True)
        return sum(layer.slab_TBKX.nbytes for layer, is_in in layers if is_in)

    def _keys(self, layer: int) -> Tensor:
        """Keys (B, K, n, H) of all slots; on a GPU where they lie, in the host's memory."""
        return self.cache.layers[layer].keys()

    def _fetch(self, layer: int, q_BNH: Tensor, start: int, pads: Sequence[int]) -> Fetched | None:
        found, kept = self.layers[layer], self.cache.layers[layer]
        assert found is not None
        slots = self._slots(layer, kept, self._next_positions(start, pads) if found.out_of_order else None)
        slots_BKm = self.policy.choose(found.index, q_BNH, slots)
        found.steps += 1
        found.resident += kept.num_slots
        found.fetched += kept.num_slots if slots_BKm is None else slots_BKm.shape[2]
        if slots_BKm is None:
            return self._gather.everything(kept)
        if self.max_slots is not None:
            use_BKn = kept.carried_BKn()
            assert use_BKn is not None
            note_choice(self.policy.pool.victim, use_BKn, slots_BKm, found.steps + SIMULATED_STEPS)
        return self._gather(kept, slots_BKm, self.policy.chosen_padding(slots, slots_BKm.shape[2]))

    def _next_positions(self, start: int, pads: Sequence[int]) -> Tensor:
        """Position of the token `start` of the padded batch in each row, without a copy from the host every time."""
        if self._pads is None or self._pads[0] != list(pads):
            self._pads = list(pads), torch.tensor(pads, device=self.cache.device)
        return start - self._pads[1]

    def _observed(self, layer: int, q_BNCH: Tensor, positions_BC: Tensor) -> Tensor:
        """Queries of the last tokens, as if they stood behind the prompt; 0 on padding.

        Which dims of a query are large depends on its position, and an index is for those that decoding will have.
        """
        observed = min(max(self.policy.observed, 1), q_BNCH.shape[2])
        q_BNwH, positions_Bw = q_BNCH[:, :, -observed:], positions_BC[:, -observed:]
        q_BNwH = q_BNwH * (positions_Bw >= 0)[:, None, :, None]
        if self._rotaries is None:
            return q_BNwH
        return self._rotaries[layer].turned(q_BNwH, torch.full_like(positions_Bw, DECODED_SOON))

    def _limit_prompt(self, layer: int, kept: KeptLayer, q_BNCH: Tensor, positions_BC: Tensor) -> None:
        """Give up what the pool has no room for, by how the prompt's last queries would have used it."""
        found, pool = self.layers[layer], self.policy.pool
        assert found is not None and self.max_slots is not None
        if kept.carried_TBK is None:
            shape = len(kept.pads), kept.shape.num_kv_heads, kept.num_slots
            kept.carry(torch.zeros(shape, dtype=torch.int32, device=q_BNCH.device))
        use_BKn = kept.carried_BKn()
        assert use_BKn is not None
        next_B = positions_BC[:, -1] + 1
        num_new = q_BNCH.shape[2]
        simulated = 0 if pool.victim is Victim.fifo else min(SIMULATED_STEPS, num_new)
        for step, token in enumerate(range(num_new - simulated, num_new), start=1):
            slots_BKm = self.policy.choose(found.index, q_BNCH[:, :, token], self._slots(layer, kept, next_B))
            if slots_BKm is not None:
                note_choice(pool.victim, use_BKn, slots_BKm, step)
        excess = kept.num_slots - self.max_slots
        if excess <= 0:
            return
        gone_BKe = self._victims(kept, use_BKn, excess, next_B)
        stays_BKn = torch.ones(use_BKn.shape, dtype=torch.bool, device=use_BKn.device).scatter_(2, gone_BKe, False)
        slots_BKm = stays_BKn.nonzero()[:, 2].view(*stays_BKn.shape[:2], self.max_slots)
        kept.keep(slots_BKm, room=0)
        found.index.keep(slots_BKm, kept.slab().read(0, self.max_slots)[0])
        found.evicted += excess

    def _slots(self, layer: int, kept: KeptLayer, next_B: Tensor | None) -> Slots:
        found = self.layers[layer]
        assert found is not None
        return Slots(
            num_slots=kept.num_slots,
            pads=kept.pads,
            positions_BKn=kept.positions_BKn() if found.out_of_order else None,
            next_B=next_B,
        )

    def _victims(self, kept: KeptLayer, use_BKn: Tensor, count: int, next_B: Tensor) -> Tensor:
        return victims(
            self.policy.pool.victim,
            use_BKn,
            kept.positions_BKn(),
            count,
            sinks=self.policy.sinks,
            keep_from_B=next_B - self.policy.recent,
        )
