"""Retrieval while decoding: an index per layer, built after the prompt, chooses the tokens that attention sees.

On a GPU choosing runs on the compute stream; with predicted queries it runs one layer ahead of the attention that
needs the chosen tokens.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, C new tokens, n stored slots, m chosen ones, w observed tokens,
# T slots with room, H key dim, V value dim, X = H + V, x some KV heads of all rows.

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from policies.base import PromptPart
from policies.pool import Victim, note_choice, victims
from policies.retriever import DECODED_SOON, FEW_TOKENS, Index, OnDevice, PromptView, Rest, Retriever, Slots, StoredPart
from runahead.attention.base import LayerInput
from runahead.attention.partial import AttentionTerms
from runahead.cache.copy_stream import copies_for
from runahead.cache.host_layer import HostLayer
from runahead.cache.kept import KeptLayer
from runahead.cache.quantised.layer import QuantisedLayer
from runahead.cache.quantised.pool import PooledLayer
from runahead.cache.slabs import KVSlab
from runahead.model.model import Model
from runahead.model.query_prediction import FoldedProjection
from runahead.report import RetrievalReport

REMEMBERED_EVERY = 4
"""One in this many of the queries that an index was built from is kept for rebuilding it."""
SIMULATED_STEPS = 32
"""Last tokens of a prompt whose queries count as decoding steps in the use statistics of a pool with a limit."""


def num_observed(policy: Retriever) -> int:
    """Last tokens of a prompt on whose queries an index or the first choice of a full pool's victims depends."""
    is_simulated = policy.pool.bytes is not None and policy.pool.victim is not Victim.fifo
    return max(policy.observed if policy.needs_queries else 0, SIMULATED_STEPS if is_simulated else 0)


@dataclass(kw_only=True)
class LayerRetrieval:
    """One layer's index, and statistics of what was retrieved.

    Attributes:
        folded: predicts queries in the index's basis, if that is possible.
        observed_BNoH: some of the queries that the index was built from, rotated to the positions that it is built
            for; None if it is not built from queries.
        terms: of this layer's attention.
        asked_BNH: query of the last generated token, by which slots are chosen for the next one; None if its own
            chooses.
        age: new tokens since the index was built, those that other ranks store among them.
        steps: decoding steps, and turns that retrieve, in which slots were chosen.
        fetched, resident: chosen and stored slots, summed over these steps.
        evicted: slots of each row and KV head whose token was replaced or dropped.
        hit_mass: attention probability of the chosen slots in each sampled step.
        out_of_order: whether a slot was overwritten, so that slots are not in the order of positions.
    """

    index: Index
    terms: AttentionTerms
    folded: FoldedProjection | None = None
    observed_BNoH: Tensor | None = None
    asked_BNH: Tensor | None = None
    age: int = 0
    steps: int = 0
    fetched: int = 0
    resident: int = 0
    evicted: int = 0
    hit_mass: list[float] = field(default_factory=list)
    out_of_order: bool = False


@dataclass(kw_only=True)
class Fetched:
    """Chosen slots of a layer, copied or being copied to the device for attention.

    On a GPU they are gathered on a separate stream, by a kernel that reads host memory over the link; the layer's
    attention waits for that kernel alone. On a CPU the pool is ordinary memory, and gathering copies the chosen rows.

    Attributes:
        bring: returns the chosen slots and, after them, room for the new tokens.
        num_bytes: bytes of those.
        under_way: whether the copy has been started.
        pads: chosen slots on the left of each row that are padding.
        slots_BKm: numbers of the chosen slots; None is all slots, in order.
        num_held: number of the last of them that were on the device.
        rest: estimate of the attention to all other slots, if there is one.
    """

    bring: Callable[[], Tensor]
    num_bytes: int
    under_way: bool
    pads: list[int]
    slots_BKm: Tensor | None
    num_held: int = 0
    rest: Rest | None = None

    def slab(self, key_dim: int) -> KVSlab:
        """The chosen slots; later compute waits for their copy."""
        return KVSlab(slab_TBKX=self.bring(), key_dim=key_dim, first=0)


class Retrieval:
    """Indices of all layers of a batch, and the slots being fetched for the next layers.

    Args:
        pool: the layers that slots are retrieved from; `settle` replaces them by layers in host memory.
        batch: number of rows.
        part: the tokens of the prompt that this rank keeps, if each rank keeps its own.

    Attributes:
        layers: index and statistics of each layer; None before the prompt, and if the layer does not retrieve.
        in_pool: which layers retrieve. The others are read whole in every step, so they stay on the device.
        max_slots: most slots of each layer that retrieves; None is no limit.
        peak_fetched_bytes: most bytes of fetched slots that layers had not read yet.

    Raises:
        ValueError: the pool's limit has no room for the tokens that always stay, or the model's queries cannot be
            predicted.
    """

    def __init__(
        self, policy: Retriever, model: Model, pool: list[KeptLayer], *, batch: int, part: PromptPart | None = None
    ) -> None:
        self._part, self._ahead = part, 0 if part is None else part.num_after
        self.policy, self.pool, self._device = policy, pool, model.device
        self.layers: list[LayerRetrieval | None] = [None] * model.num_layers
        looks_ahead = policy.late is None and policy.looks_ahead_on(model.device)
        self._prediction = model.query_prediction if looks_ahead else None
        self._rotaries, self._max_positions = model.known_rotaries, model.max_positions
        self._newest: dict[int, list[int]] = {}  # by layer: clamped position of the newest token of each row
        self._mean_over_shares = model.mean_over_shards if model.num_shards > 1 else None
        self._fetched: dict[int, Fetched | None] = {}
        self._copies = copies_for(model.device)
        few = FEW_TOKENS if self._copies is None else 0
        self._min_tokens = few if policy.min_tokens is None else policy.min_tokens
        self._places_BK: Tensor | None = None
        self._pads: tuple[list[int], Tensor] | None = None
        self.in_pool = [
            layer >= policy.first_layer and (rule is None or rule.sees_everything)
            for layer, rule in enumerate(model.rules)
        ]
        self.max_slots: int | None = None
        self.peak_fetched_bytes = 0
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
        """Bytes of indices, folded projections and queries kept for rebuilding, and the peak of fetched bytes."""
        layers = [layer for layer in self.layers if layer is not None]
        folded = sum(layer.folded.num_bytes for layer in layers if layer.folded is not None)
        observed = sum(layer.observed_BNoH.nbytes for layer in layers if layer.observed_BNoH is not None)
        return sum(layer.index.num_bytes for layer in layers) + folded + observed + self.peak_fetched_bytes

    def fork(self, pool: list[KeptLayer]) -> Retrieval:
        """An independent copy over other layers with the same slots."""
        other = copy.copy(self)
        other.pool, other._fetched, other._newest = pool, {}, {}
        other.layers = [None if layer is None else copy.copy(layer) for layer in self.layers]
        for number, layer in enumerate(other.layers):
            if layer is not None:
                layer.index = layer.index.fork(partial(other._keys, number))
                layer.hit_mass = list(layer.hit_mass)
        return other

    def store_prompt(
        self,
        layer: int,
        q_BNCH: Tensor,
        positions_BC: Tensor,
        terms: AttentionTerms,
        *,
        room: int,
        was_cut: bool,
        stored_parts_B: Sequence[Sequence[StoredPart]] = (),
    ) -> None:
        """Build or extend a layer's index after the attention of given tokens; see `KeptCache.index`.

        Args:
            stored_parts_B: as in `PromptView`.
        """
        if layer < self.policy.first_layer:
            return
        found, num_new, observed = self.layers[layer], q_BNCH.shape[2], self.policy.observed
        self._fetched.pop(layer, None)  # chosen before these tokens came
        if found is not None:
            found.asked_BNH = None
        q_BNwH, is_short = self._observed(layer, q_BNCH, positions_BC), num_new < observed or observed == 0
        if found is not None and not was_cut and (is_short or self.policy.extends):
            if not is_short:
                found.index.see(q_BNwH)
            self._index_all(layer)
            found.age += num_new
        else:
            next_B = self._after(positions_BC)
            kv = self.pool[layer].read()
            self._make_index(
                layer, *kv, q_BNwH, next_B, terms, room=room, was_cut=was_cut, stored_parts_B=stored_parts_B
            )
        if self.max_slots is not None:
            self._limit_prompt(layer, q_BNCH, positions_BC)

    def _make_index(
        self,
        layer: int,
        k_BKnH: Tensor,
        v_BKnV: Tensor,
        q_BNwH: Tensor,
        next_B: Tensor,
        terms: AttentionTerms,
        *,
        room: int,
        was_cut: bool = False,
        stored_parts_B: Sequence[Sequence[StoredPart]] = (),
    ) -> None:
        """Build a layer's index of these tokens, for queries like `q_BNwH`, which are rotated to later positions.

        Args:
            was_cut: tokens of an earlier index are not among these.
        """
        view = PromptView(
            layer=layer,
            num_layers=len(self.layers),
            q_BNwH=q_BNwH,
            k_BKnH=k_BKnH,
            v_BKnV=v_BKnV,
            scaling=terms.scaling,
            softcap=terms.softcap,
            pads=list(self.pool[layer].pads),
            positions_BKn=self.pool[layer].positions_BKn(),
            next_B=next_B,
            turn=None if self._rotaries is None else self._rotaries[layer].turned,
            room=room,
            stored=partial(self._keys, layer),
            stored_parts_B=stored_parts_B,
        )
        found = self.layers[layer]
        if found is not None and self.policy.renews_index and not was_cut:
            self._index_all(layer)
            index = self.policy.renewed(found.index, view)
        else:
            index = self.policy.index(view)
        if found is None:
            found = self.layers[layer] = LayerRetrieval(index=index, terms=terms)
        found.index, found.folded, found.terms, found.age = index, self._folded(layer, index), terms, 0
        if self.policy.observed and self._rotaries is not None and not self.policy.extends:
            some_BNoH = q_BNwH[:, :, ::REMEMBERED_EVERY] if q_BNwH.shape[2] == self.policy.observed else q_BNwH
            found.observed_BNoH = some_BNoH.clone()

    def _renew_if_old(self, layer: int, start: int, pads: Sequence[int]) -> None:
        """Rebuild or renew an old index for the positions that decoding has reached, as rotation changes the queries.

        Layers take turns, so that no step rebuilds all of them.
        """
        found = self._index_of(layer)
        if found.observed_BNoH is None or found.age < DECODED_SOON + layer:
            return
        assert self._rotaries is not None
        by_Bo = torch.full_like(found.observed_BNoH[:, 0, :, 0], found.age, dtype=torch.int64)
        q_BNoH = self._rotaries[layer].turned(found.observed_BNoH, by_Bo)
        k_BKnH, v_BKnV = self.pool[layer].read()
        if self.pool[layer].on_host and not self.policy.renews_index:
            k_BKnH = k_BKnH.contiguous()  # one copy over the link, since an index reads them more than once
        next_B = self._next_positions(start, pads)
        self._make_index(layer, k_BKnH, v_BKnV, q_BNoH, next_B, found.terms, room=DECODED_SOON + layer)

    def settle(self, layer: int, *, room: int) -> None:
        """Move a layer that retrieves to host memory, if the device is a GPU; one in few bits becomes a pool.

        The layer must own its memory. With `room` 0 the number of later tokens is unknown, and new memory has room for
        an eighth more, as it has when it grows.
        """
        kept, spare = self.pool[layer], room or self.pool[layer].num_slots // 8
        if self.in_pool[layer] and isinstance(kept, QuantisedLayer) and not isinstance(kept, PooledLayer):
            kept = self.pool[layer] = PooledLayer.of_quantised(kept, room=spare if self._copies is None else 0)
        if self._copies is not None and self.in_pool[layer] and not kept.on_host:
            if self.max_slots is not None:
                most = max(0, self.max_slots - kept.num_slots)
                room, spare = min(room, most), min(spare, most)
            if isinstance(kept, PooledLayer):
                self.pool[layer] = kept.to_host(self._copies, room=room, spare=spare)
            else:
                self.pool[layer] = HostLayer.of(kept, self._copies, room=room, spare=spare)

    def look_ahead(self, layer: int, given: LayerInput) -> None:
        """Choose and start fetching a layer's slots, by queries predicted from the input of the layer before it."""
        if self._prediction is None or layer < self.policy.first_ahead or not self._chooses(layer):
            return
        self._renew_if_old(layer, given.start, given.pads)
        found = self._index_of(layer)
        if not self.policy.asks:
            q_BNH = given.x_BCD
        elif found.folded is not None:
            q_BNH = found.folded.queries(given)
        else:
            q_BNH = self._prediction.queries(layer, given)[:, :, -1]
        self._fetched[layer] = self._fetch(layer, q_BNH, given.start, given.pads)

    def serves_given(self, layer: int, num_new: int) -> bool:
        """Whether so many given tokens attend to what is retrieved for them; of a first turn there is no index yet."""
        if self.policy.clamps and self._exceeds(self.pool[layer].num_slots + num_new):
            return True
        return num_new <= self.policy.turn_tokens and self._part is None and self._chooses(layer)

    def _exceeds(self, num_tokens: int) -> bool:
        """Whether a text of so many tokens is longer than the model's context."""
        return self._max_positions is not None and num_tokens > self._max_positions

    def clamped_from(self, layer: int, end: int, pads: Sequence[int]) -> list[int]:
        """Slot of each row, among those that new tokens see, at which positions begin; earlier slots are at 0, too.

        The last of them is as far from the newest token as the window is long. A row of which everything is seen, and
        which fits into the model's context, is at its own positions.

        Args:
            end: number of slots that are seen, those of new tokens included.
            pads: number of them that are padding, by row.
        """
        kept, first = self.pool[layer], max(0, end - 1 - self.policy.recent)
        bases = [
            pad if end - pad == kept.num_slots - row_pad and not self._exceeds(end - pad) else first
            for pad, row_pad in zip(pads, kept.pads, strict=True)
        ]
        self._newest[layer] = [end - 1 - base for base in bases]
        return bases

    def seen_whole(self, layer: int) -> None:
        """Note that given tokens attend to all slots of a layer, each at its own position."""
        self._newest.pop(layer, None)

    def _at_window(self, layer: int, q_BNCH: Tensor) -> Tensor:
        """Unrotated queries, rotated to the distance of clamped keys."""
        rotary = self.pool[layer].rotary
        assert rotary is not None, layer
        return rotary.turned(q_BNCH, torch.full_like(q_BNCH[:, 0, :, 0], self.policy.recent, dtype=torch.int64))

    def grow(self, num_slots: int) -> None:
        """Take in tokens that were stored in the memory of the pool after its slots. Indices get them when asked next.

        Args:
            num_slots: of every layer from then on.
        """
        for kept, found in zip(self.pool, self.layers, strict=True):
            if found is not None:
                found.age += num_slots - kept.num_slots
            kept.num_slots = num_slots

    def fetched(
        self, layer: int, q_BNCH: Tensor, start: int, pads: Sequence[int], *, room: int | None = None
    ) -> Fetched | None:
        """The slots of a layer that new tokens attend to, the same for all of them; None is all slots.

        Args:
            room: tokens that come after the fetched ones; by default the new ones.
        """
        if not self._chooses(layer):
            return None
        found, num_slots = self._index_of(layer), self.pool[layer].num_slots
        asked_BNH = found.asked_BNH if q_BNCH.shape[2] == 1 else None
        if asked_BNH is None and found.asked_BNH is not None:
            self._fetched.pop(layer, None)  # chosen late, for one token
        if layer not in self._fetched:  # not chosen ahead, by this policy, for the first layers or in a fork
            self._renew_if_old(layer, start, pads)
            asking_BNCH = self._at_window(layer, q_BNCH) if self.policy.clamps else q_BNCH
            q_BNH = self._as_heads(layer, asking_BNCH) if asked_BNH is None else asked_BNH
            self._fetched[layer] = self._fetch(layer, q_BNH, start, pads, num_new=room or q_BNCH.shape[2])
        chosen = self._fetched[layer]
        if asked_BNH is not None and chosen is not None and chosen.slots_BKm is not None:
            chosen = self._corrected(layer, chosen, chosen.slots_BKm, asked_BNH, q_BNCH[:, :, 0], start, pads)
            self._fetched[layer] = chosen
        found.steps += 1
        found.resident += num_slots
        slots_BKm = None if chosen is None else chosen.slots_BKm
        num_held = 0 if chosen is None else chosen.num_held
        found.fetched += num_slots if slots_BKm is None else slots_BKm.shape[2] - num_held
        held = [each.num_bytes for at, each in self._fetched.items() if each and (at == layer or each.under_way)]
        self.peak_fetched_bytes = max(self.peak_fetched_bytes, sum(held))
        return self._fetched.pop(layer)

    def store_new(
        self, layer: int, k_BKCH: Tensor, v_BKCV: Tensor, positions_BC: Tensor, new_pads: list[int], *, is_turn: bool
    ) -> None:
        """Store new tokens; in a full pool a generated one replaces another one.

        Args:
            positions_BC: positions of the new tokens in their rows.
            new_pads: number of padding tokens among them, by row.
            is_turn: they are given, and `store_prompt` adds them to the index.
        """
        found, kept, num_new = self.layers[layer], self.pool[layer], k_BKCH.shape[2]
        if found is not None and not is_turn:
            found.age += num_new
        if found is None or self.max_slots is None or kept.num_slots < self.max_slots:
            if self.max_slots is not None and found is not None and kept.num_slots == kept.slab_TBKX.shape[0]:
                kept.copy_out(room=min(1 + kept.num_slots // 8, self.max_slots - kept.num_slots))
            kept.store(k_BKCH, v_BKCV, positions_BC, new_pads)
            if found is not None and not is_turn and kept.num_slots > self._min_tokens:
                self._index_all(layer, (k_BKCH, v_BKCV))
            return
        assert num_new == 1, num_new
        slots_BK = self._victims(kept, 1, positions_BC[:, 0] + 1)[..., 0]
        kept.overwrite(slots_BK, k_BKCH, v_BKCV, positions_BC)
        found.index.overwrite(slots_BK, k_BKCH[:, :, 0], v_BKCV[:, :, 0])
        found.evicted, found.out_of_order = found.evicted + 1, True

    def _index_all(self, layer: int, new: tuple[Tensor, Tensor] | None = None) -> None:
        """Add the slots to a layer's index that it lacks.

        Args:
            new: keys and values of the last ones, where they need not be read from the pool.
        """
        index, kept = self._index_of(layer).index, self.pool[layer]
        num_lacking = kept.num_slots - index.num_slots  # more than the new ones if there were too few to choose from
        if num_lacking == 0:
            return
        if new is None or num_lacking != new[0].shape[2]:
            k_BKnH, v_BKnV = kept.read()
            new = k_BKnH[:, :, index.num_slots :], v_BKnV[:, :, index.num_slots :]
        index.append(*new)

    def choose_late(self, layer: int, q_BNCH: Tensor, start: int, pads: Sequence[int]) -> None:
        """Choose slots for the token with index `start` by the queries before it, and start fetching them."""
        if self.policy.late is not None and self._chooses(layer):
            self._renew_if_old(layer, start, pads)
            asked_BNH = self._index_of(layer).asked_BNH = q_BNCH[:, :, -1]
            self._fetched[layer] = self._fetch(layer, asked_BNH, start, pads)

    def _corrected(
        self,
        layer: int,
        before: Fetched,
        before_BKm: Tensor,
        asked_BNH: Tensor,
        q_BNH: Tensor,
        start: int,
        pads: Sequence[int],
    ) -> Fetched:
        """The choice of an earlier query, and in KV heads whose own query differs from that one their own.

        Args:
            before, before_BKm: what was chosen, and its slots.
            asked_BNH: the earlier query.
            q_BNH: the own one.
        """
        found, kept, late = self._index_of(layer), self.pool[layer], self.policy.late
        assert late is not None
        alike_BN = torch.cosine_similarity(q_BNH.float(), asked_BNH.float(), dim=-1)
        again_BK = alike_BN.unflatten(1, (kept.shape.num_kv_heads, -1)).mean(dim=2) < late
        if late == 1:  # no cosine is too large, whatever its rounding
            again_BK = torch.ones_like(again_BK)
        again_x = again_BK.flatten().nonzero()[:, 0]  # for their number the host waits
        if len(again_x) == 0:
            return before
        choice = self.policy.choose(found.index, q_BNH, self._slots_at(layer, start, pads))
        assert choice is not None and choice.slots_BKm.shape == before_BKm.shape
        own_BKm = self._in_order(choice.slots_BKm, before.pads)
        slots_BKm = torch.where(again_BK.unsqueeze(2), own_BKm, before_BKm)
        rows_mx = slots_BKm.flatten(0, 1)[again_x].T * again_BK.numel() + again_x
        bring_again = kept.gather(rows_mx.flatten(), room=0, heads=(1, len(again_x)))
        assert bring_again is not None

        def bring() -> Tensor:
            slab_TBKX = before.bring()
            slab_TBKX[: len(rows_mx)].flatten(1, 2)[:, again_x] = bring_again()[:, 0]
            return slab_TBKX

        return replace(before, bring=bring, slots_BKm=slots_BKm)

    def pass_over(self, layer: int) -> None:
        """Note a new token that another rank stores."""
        found = self.layers[layer]
        if found is not None:
            found.age += 1

    def sample_hits(self, layer: int, q_BNH: Tensor, k_BKCH: Tensor, fetched: Fetched | None, scaling: float) -> None:
        """Record the attention probability of the fetched slots, if this step is to be sampled.

        Args:
            k_BKCH: key of the new token, or of none if another rank stores it.
        """
        found, every = self.layers[layer], self.policy.sample_every
        if found is None or fetched is None or every == 0 or found.steps % every:
            return
        if fetched.slots_BKm is None:
            found.hit_mass.append(1.0)
            return
        k_BKnH = self._keys(layer)
        if self.policy.clamps:
            q_BNH, k_BKnH, k_BKCH = self._clamped(layer, q_BNH, k_BKnH, k_BKCH)
        q_BKGH = q_BNH.unflatten(1, (k_BKnH.shape[1], -1)) * scaling
        scores_BKGn = (q_BKGH @ k_BKnH.transpose(-1, -2)).float()
        for row, pad in enumerate(self.pool[layer].pads):
            scores_BKGn[row, :, :, :pad] = -torch.inf
        own_BKGC = (q_BKGH @ k_BKCH.transpose(-1, -2)).float()
        probabilities = torch.cat([scores_BKGn, own_BKGC], dim=-1).softmax(dim=-1)
        slots_BKGm = fetched.slots_BKm[:, :, None].expand(-1, -1, q_BKGH.shape[2], -1)
        seen = probabilities.gather(3, slots_BKGm).sum(dim=-1) + probabilities[..., k_BKnH.shape[2] :].sum(dim=-1)
        sees_any = [row for row, pad in enumerate(self.pool[layer].pads) if pad < k_BKnH.shape[2] or k_BKCH.shape[2]]
        if sees_any:  # else every row is padding here, and its tokens are another rank's
            found.hit_mass.append(float(seen[sees_any].mean()))

    def _clamped(self, layer: int, q_BNH: Tensor, k_BKnH: Tensor, k_BK1H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A new token's query, all keys and its key, unrotated, at the positions that they have for this query."""
        rotary, num_slots = self.pool[layer].rotary, k_BKnH.shape[2]
        assert rotary is not None, layer
        bases = [max(0, num_slots - self.policy.recent)] * len(q_BNH)
        k_nBKH = rotary.rotated(k_BKnH.permute(2, 0, 1, 3), 0, bases)
        new_1BXH = rotary.rotated(torch.cat([q_BNH, k_BK1H[:, :, 0]], dim=1)[None], num_slots, bases)
        q_BNH, k_BKH = new_1BXH[0].split([q_BNH.shape[1], k_BK1H.shape[1]], dim=1)
        return q_BNH, k_nBKH.permute(1, 2, 0, 3), k_BKH.unsqueeze(2)

    def _folded(self, layer: int, index: Index) -> FoldedProjection | None:
        """The query projection folded with an index's basis; None if the index has no smaller basis of one row.

        Rows of a batch have different bases, and folded weights for each would cost more than they save.
        """
        basis_BKHr = index.query_basis_BKHr
        if self._prediction is None or basis_BKHr is None or basis_BKHr.shape[0] > 1:
            return None
        full = basis_BKHr.shape[3] == basis_BKHr.shape[2]  # saves nothing
        return None if full else self._prediction.folded(layer, basis_BKHr[0])

    def _chooses(self, layer: int) -> bool:
        """Whether attention sees only chosen slots of a layer."""
        if layer >= len(self.layers) or self.layers[layer] is None:
            return False
        return self.pool[layer].num_slots >= self._min_tokens

    def _index_of(self, layer: int) -> LayerRetrieval:
        """The index and statistics of a layer that has some."""
        found = self.layers[layer]
        assert found is not None, layer
        return found

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
        """Bytes of keys and values in the pool, which is in host memory."""
        layers = zip(self.pool, self.in_pool, strict=True)
        return sum(layer.pool_bytes for layer, is_in in layers if is_in)

    def _keys(self, layer: int) -> Tensor:
        """Keys (B, K, n, H) of all slots; on a GPU as a view of the pool in host memory."""
        return self.pool[layer].read()[0]

    def _fetch(self, layer: int, q_BNH: Tensor, start: int, pads: Sequence[int], *, num_new: int = 1) -> Fetched | None:
        """Choose slots for new tokens and start fetching them; None if attention reads all slots in place."""
        found, kept = self._index_of(layer), self.pool[layer]
        self._index_all(layer)  # tokens of a turn that is not over
        slots = self._slots_at(layer, start, pads)
        choice = self.policy.choose(found.index, q_BNH, slots)
        if choice is None:
            return self._gathered(kept, None, list(kept.pads), room=num_new)
        slots_BKm = choice.slots_BKm
        if self.max_slots is not None:
            note_choice(self.policy.pool.victim, _use_of(kept), slots_BKm, found.steps + 1 + SIMULATED_STEPS)
        chosen_pads = self.policy.chosen_padding(slots, slots_BKm.shape[2])
        fetched = self._gathered(kept, slots_BKm, chosen_pads, room=num_new, on_device=choice.on_device)
        if fetched is not None:
            fetched.rest = choice.rest
        return fetched

    def _gathered(
        self,
        kept: KeptLayer,
        slots_BKm: Tensor | None,
        pads: list[int],
        *,
        room: int,
        on_device: OnDevice | None = None,
    ) -> Fetched | None:
        """Start fetching slots of a layer; None if attention can read them in place.

        Args:
            slots_BKm: the chosen slots; None is all slots.
            pads: number of padding slots among the chosen ones, by row.
            room: number of new tokens, which come after them.
            on_device: what need not be fetched of the chosen slots.
        """
        batch, heads, num_chosen, rows_mBK = len(kept.pads), kept.shape.num_kv_heads, kept.num_slots, None
        num_held, held_BKo, skips_keys = 0, None, on_device is not None and on_device.keys is not None
        if slots_BKm is not None:
            num_chosen = slots_BKm.shape[2]
            if on_device is not None:
                num_held = on_device.kv_BKoX.shape[2]
                slots_BKm, held_BKo = slots_BKm.split([num_chosen - num_held, num_held], dim=2)
            slots_BKm = self._in_order(slots_BKm, pads)
            if self._places_BK is None or self._places_BK.shape != (batch, heads):
                self._places_BK = torch.arange(batch * heads, device=slots_BKm.device).view(batch, heads)
            rows_mBK = torch.add(self._places_BK, slots_BKm.permute(2, 0, 1), alpha=batch * heads).flatten()
        kept.expect(room)
        bring = kept.gather(rows_mBK, room=num_held + room, skips_keys=skips_keys)
        if bring is None:
            return None
        num_bytes = kept.fetched_bytes(num_chosen, room=room)
        if on_device is not None and slots_BKm is not None and held_BKo is not None:
            bring = partial(_completed, bring, on_device, slots_BKm)
            slots_BKm = torch.cat([slots_BKm, held_BKo], dim=2)
        return Fetched(
            bring=bring,
            num_bytes=num_bytes,
            under_way=kept.on_host,
            pads=pads,
            slots_BKm=slots_BKm,
            num_held=num_held,
        )

    @staticmethod
    def _in_order(slots_BKm: Tensor, pads: Sequence[int]) -> Tensor:
        """Chosen slots with their padding first; the order of tokens does not matter."""
        return slots_BKm.sort(dim=-1).values if any(pads) else slots_BKm

    def _as_heads(self, layer: int, q_BNCH: Tensor) -> Tensor:
        """Queries (B, N x C, H) of several tokens as if they were those of further heads of their groups."""
        return q_BNCH.unflatten(1, (self.pool[layer].shape.num_kv_heads, -1)).flatten(1, 3)

    def _slots_at(self, layer: int, start: int, pads: Sequence[int]) -> Slots:
        """The slots that the policy chooses from, for the token with index `start`."""
        by_position = self._index_of(layer).out_of_order or self._part is not None
        return self._slots(layer, self._next_positions(start, pads) if by_position else None)

    def _next_positions(self, start: int, pads: Sequence[int]) -> Tensor:
        """Position in each row of the token with index `start`. The pads are copied to the device only once."""
        if self._pads is None or self._pads[0] != list(pads):
            self._pads = list(pads), torch.tensor(pads, device=self._device)
        return start - self._pads[1]

    def _after(self, positions_BC: Tensor) -> Tensor:
        """Position in each row of the first token after the prompt, whose last tokens on this rank are at these."""
        return positions_BC[:, -1] + 1 + self._ahead

    def _observed(self, layer: int, q_BNCH: Tensor, positions_BC: Tensor) -> Tensor:
        """Queries of the last tokens, rotated to positions after the prompt; 0 on padding.

        A query's large dims depend on its position, and an index serves the positions of tokens to be decoded.
        """
        observed = min(max(self.policy.observed, 1), q_BNCH.shape[2])
        q_BNwH, positions_Bw = q_BNCH[:, :, -observed:], positions_BC[:, -observed:]
        q_BNwH = q_BNwH * (positions_Bw >= 0)[:, None, :, None]
        if self._rotaries is None:
            return q_BNwH
        if self.policy.clamps:
            if layer in self._newest:  # they have attended at other positions than their own
                newest_B = torch.tensor(self._newest.pop(layer), device=positions_Bw.device)
                positions_Bw = newest_B[:, None] + torch.arange(1 - observed, 1, device=positions_Bw.device)
            return self._rotaries[layer].turned(q_BNwH, self.policy.recent - positions_Bw.clamp_min(0))
        return self._rotaries[layer].turned(q_BNwH, torch.full_like(positions_Bw, self._ahead + DECODED_SOON))

    def _limit_prompt(self, layer: int, q_BNCH: Tensor, positions_BC: Tensor) -> None:
        """Drop tokens for which the pool has no room, by how the prompt's last queries would have used them."""
        found, kept, victim = self._index_of(layer), self.pool[layer], self.policy.pool.victim
        assert self.max_slots is not None
        if kept.carried_TBK is None:
            shape = len(kept.pads), kept.shape.num_kv_heads, kept.num_slots
            kept.carry(torch.zeros(shape, dtype=torch.int32, device=q_BNCH.device))
        use_BKn, next_B = _use_of(kept), self._after(positions_BC)
        num_new = q_BNCH.shape[2]
        simulated = 0 if victim is Victim.fifo else min(SIMULATED_STEPS, num_new)
        for step, token in enumerate(range(num_new - simulated, num_new), start=1):
            choice = self.policy.choose(found.index, q_BNCH[:, :, token], self._slots(layer, next_B))
            if choice is not None:
                note_choice(victim, use_BKn, choice.slots_BKm, step)
        excess = kept.num_slots - self.max_slots
        if excess <= 0:
            return
        gone_BKe = self._victims(kept, excess, next_B)
        stays_BKn = torch.ones(use_BKn.shape, dtype=torch.bool, device=use_BKn.device).scatter_(2, gone_BKe, False)
        slots_BKm = stays_BKn.nonzero()[:, 2].view(*stays_BKn.shape[:2], self.max_slots)
        kept.keep(slots_BKm, room=0)
        found.index.keep(slots_BKm, *kept.slab().read(0, self.max_slots))
        found.evicted += excess

    def _slots(self, layer: int, next_B: Tensor | None) -> Slots:
        """The slots that the policy chooses from, for a token at position `next_B` of each row."""
        kept = self.pool[layer]
        by_position = self._index_of(layer).out_of_order or self._part is not None
        positions_BKn = kept.positions_BKn() if by_position else None
        return Slots(
            num_slots=kept.num_slots,
            pads=kept.pads,
            positions_BKn=positions_BKn,
            next_B=next_B,
            mean_over_shares=self._mean_over_shares,
        )

    def _victims(self, kept: KeptLayer, count: int, next_B: Tensor) -> Tensor:
        """The `count` slots (B, K, count) of each row and KV head to replace or drop."""
        sinks, keep_from_B = self.policy.sinks, next_B - self.policy.recent
        victim, positions_BKn = self.policy.pool.victim, kept.positions_BKn()
        return victims(victim, _use_of(kept), positions_BKn, count, sinks=sinks, keep_from_B=keep_from_B)


def _completed(bring: Callable[[], Tensor], on_device: OnDevice, fetched_BKf: Tensor) -> Tensor:
    """Fetched slots with what the index holds of them, and of the slots after them."""
    slab_TBKX = bring()
    on_device.complete(slab_TBKX, fetched_BKf)
    return slab_TBKX


def _use_of(kept: KeptLayer) -> Tensor:
    """Use statistics (B, K, n) of the slots of a layer in a limited pool, as the policy carries them along."""
    use_BKn = kept.carried_BKn()
    assert use_BKn is not None
    return use_BKn
