"""Retrieval while decoding: an index per layer, built after the prompt, chooses the tokens that attention sees.

On a GPU choosing runs on the compute stream; with predicted queries it runs one layer ahead of the attention that
needs the chosen tokens.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, m chosen ones, H key dim, V value dim,
# x some KV heads of all rows.

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from policies.layer_view import PromptPart
from policies.retriever import FEW_TOKENS, Retriever, Slots, StoredPart
from runahead.attention.base import LayerInput
from runahead.attention.op import nothing
from runahead.attention.partial import AttentionTerms
from runahead.cache.host.copy_stream import copies_for
from runahead.cache.kept import KeptLayer
from runahead.cache.quantised.pool import pooled, to_host
from runahead.model.model import Model
from runahead.report import RetrievalReport
from runahead.retrieval.clamped import ClampedDistances
from runahead.retrieval.fetched import Fetched, Fetches
from runahead.retrieval.indices import Indices
from runahead.retrieval.layer import LayerRetrieval
from runahead.retrieval.pool_limit import PoolLimit, num_simulated


def num_observed(policy: Retriever) -> int:
    """Last tokens of a prompt on whose queries an index or the first choice of a full pool's victims depends."""
    return max(policy.observed if policy.needs_queries else 0, num_simulated(policy))


class Retrieval:
    """Indices of all layers of a batch, and the slots being fetched for the next layers.

    Args:
        pool: the layers that slots are retrieved from; `offload` replaces them by layers in host memory.
        batch: number of rows.
        part: the tokens of the prompt that this rank keeps, if each rank keeps its own.

    Attributes:
        in_pool: which layers retrieve. The others are read whole in every step, so they stay on the device.
        limit: limit of the pool; None if there is none.
        clamped: positions of queries and keys; None if they are at their own.
        await_device: called before the host asks the device for a value.

    Raises:
        ValueError: the pool's limit has no room for the tokens that always stay, or the model's queries cannot be
            predicted.
    """

    def __init__(
        self, policy: Retriever, model: Model, pool: list[KeptLayer], *, batch: int, part: PromptPart | None = None
    ) -> None:
        self.policy, self.pool, self._part = policy, pool, part
        self._ranges = model.ranges
        self._copies = copies_for(model.device)
        few = FEW_TOKENS if self._copies is None else 0
        self._min_tokens = few if policy.min_tokens is None else policy.min_tokens
        self._mean_over_shares = model.mean_over_shards if model.num_shards > 1 else None
        looks_ahead = policy.late is None and policy.looks_ahead_on(model.device)
        self._prediction = model.query_prediction if looks_ahead else None
        self.clamped = ClampedDistances(policy.recent, model.max_positions) if policy.clamps else None
        num_ahead = 0 if part is None else part.num_after
        self._indices = Indices(policy, model, pool, num_ahead, self._prediction, self.clamped)
        self._fetches = Fetches()
        # By layer, of the pieces of a prompt whose last one is to come: their end, the queries that count, positions.
        self._earlier: dict[int, tuple[int | None, Tensor, Tensor]] = {}
        self._surprise_BS, self._num_told = [list[float]() for _ in range(batch)], 0
        self.await_device: Callable[[], None] = nothing
        self.in_pool = [policy.retrieves_in(layer) and rule is None for layer, rule in enumerate(model.rules)]
        self.limit: PoolLimit | None = None
        if policy.pool.bytes is not None:
            retrieving = zip(model.kv_shapes, self.in_pool, strict=True)
            slot_bytes = max(1, sum(shape.bytes_per_token(batch) for shape, is_in in retrieving if is_in))
            self.limit = PoolLimit(policy, slot_bytes)

    @property
    def layers(self) -> list[LayerRetrieval | None]:
        """Index and statistics of each layer; None before the prompt, and if the layer does not retrieve."""
        return self._indices.layers

    @property
    def peak_fetched_bytes(self) -> int:
        """Most bytes of fetched slots that layers had not read yet."""
        return self._fetches.peak_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of indices, folded projections and queries kept for rebuilding, and the peak of fetched bytes."""
        return sum(layer.num_bytes for layer in self.layers if layer is not None) + self.peak_fetched_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of keys and values in the pool, which is in host memory."""
        layers = zip(self.pool, self.in_pool, strict=True)
        return sum(layer.pool_bytes for layer, is_in in layers if is_in)

    def working(self) -> AbstractContextManager[object]:
        """Context manager in which the policy chooses or stores: a range of a profile."""
        return self._ranges("policy", self.policy.label)

    def fork(self, pool: list[KeptLayer]) -> Retrieval:
        """An independent copy over other layers with the same slots."""
        other = copy.copy(self)
        other.pool, other._fetches, other._earlier = pool, self._fetches.fork(), dict(self._earlier)
        other.clamped = None if self.clamped is None else self.clamped.fork()
        other._indices = self._indices.fork(pool, other.clamped)
        other._surprise_BS = [list(surprise_S) for surprise_S in self._surprise_BS]
        return other

    def observe(self, layer: int, q_BNCH: Tensor, positions_BC: Tensor, chunk: range) -> None:
        """Implements `KeptCache.observe`: the last tokens, whose queries count, may be in several pieces."""
        count = num_observed(self.policy)
        if count and self.in_pool[layer]:
            q_BNCH, positions_BC = self.with_earlier(layer, q_BNCH, positions_BC, chunk.start)
            self._earlier[layer] = chunk.stop, q_BNCH[:, :, -count:].clone(), positions_BC[:, -count:].clone()

    def with_earlier(self, layer: int, q_BNCH: Tensor, positions_BC: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Queries and positions of new tokens, after those that count of the pieces of their prompt before them.

        Args:
            start: index of the first new token in the padded batch.
        """
        end, before_BNCH, before_BC = self._earlier.pop(layer, (None, q_BNCH, positions_BC))
        if end != start:  # none, or of a turn before, which was never indexed
            return q_BNCH, positions_BC
        return torch.cat([before_BNCH, q_BNCH], dim=2), torch.cat([before_BC, positions_BC], dim=1)

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
        """Build or extend a layer's index after the attention of given tokens; see `KeptCache.index`, `PromptView`."""
        if not self.policy.retrieves_in(layer):
            return
        self._fetches.drop(layer)  # chosen before these tokens came
        found = self.layers[layer]
        if found is not None:
            found.asked_BNH = None
        q_BNwH = self._indices.observed(layer, q_BNCH, positions_BC)
        if was_cut or not self._indices.extend(layer, q_BNwH, q_BNCH.shape[2]):
            next_B = self._indices.after(positions_BC)
            kv = self.pool[layer].read()
            self._indices.build(
                layer, kv, q_BNwH, next_B, terms, room=room, was_cut=was_cut, stored_parts_B=stored_parts_B
            )
        if self.limit is not None:
            slots = self._slots(layer, self._indices.after(positions_BC))
            self.await_device()
            self.pool[layer] = self.pool[layer].to_device()
            self.limit.cut_back(self._indices[layer], self.pool[layer], q_BNCH, slots)

    def see_surprise(self, surprise_BC: Tensor, start: int) -> None:
        """Implements `KeptCache.see_surprise`. Pieces before the one after which indices are made are told with it."""
        for surprise_S, new_C in zip(self._surprise_BS, surprise_BC.tolist(), strict=True):
            surprise_S += [math.nan] * (start - len(surprise_S))  # of generated tokens
            surprise_S[start:] = new_C
        indices = [found.index for found in self.layers if found is not None]
        if indices:
            self.policy.tell(indices, self._surprise_BS, self._num_told)
            self._num_told = len(self._surprise_BS[0])

    def offload(self, layer: int, *, room: int) -> None:
        """Move a layer that retrieves to host memory, if the device is a GPU; one in few bits becomes a pool.

        The layer must own its memory. With `room` 0 the number of later tokens is unknown, and new memory has room for
        an eighth more, as it has when it grows.
        """
        kept, spare = self.pool[layer], room or self.pool[layer].num_slots // 8
        if self.in_pool[layer] and kept.few is not None:
            kept = self.pool[layer] = pooled(kept, room=spare if self._copies is None else 0)
        if self._copies is not None and self.in_pool[layer] and not kept.on_host:
            if self.limit is not None:
                room, spare = min(room, self.limit.room(kept)), min(spare, self.limit.room(kept))
            self.pool[layer] = to_host(kept, self._copies, room=room, spare=spare)

    def serves_given(self, layer: int, num_new: int) -> bool:
        """Whether so many given tokens attend to what is retrieved for them; of a first turn there is no index yet."""
        if self.clamped is not None and self.clamped.exceeds(self.pool[layer].num_slots + num_new):
            return True
        return num_new <= self.policy.turn_tokens and self._part is None and self._chooses(layer)

    def grow(self, num_slots: int) -> None:
        """Take in tokens that were stored in the memory of the pool after its slots. Indices get them when asked next.

        Args:
            num_slots: of every layer from then on, with those before the first one of a layer with a window.
        """
        for kept, found in zip(self.pool, self.layers, strict=True):
            if found is not None:
                found.age += num_slots - kept.num_slots
            kept.set_end(num_slots)

    def look_ahead(self, layer: int, given: LayerInput) -> None:
        """Choose and start fetching a layer's slots, by queries predicted from the input of the layer before it."""
        if self._prediction is None or layer < self.policy.first_ahead or not self._chooses(layer):
            return
        self._indices.renew_if_old(layer, given.start, given.pads)
        folded = self._indices[layer].folded
        if not self.policy.asks:
            q_BNH = given.x_BCD
        elif folded is not None:
            q_BNH = folded.queries(given)
        else:
            q_BNH = self._prediction.queries(layer, given)[:, :, -1]
        self._fetch(layer, q_BNH, given.start, given.pads)

    def choose_late(self, layer: int, q_BNCH: Tensor, start: int, pads: Sequence[int]) -> None:
        """Choose slots for the token with index `start` by the queries before it, and start fetching them."""
        if self.policy.late is not None and self._chooses(layer):
            self._indices.renew_if_old(layer, start, pads)
            asked_BNH = self._indices[layer].asked_BNH = q_BNCH[:, :, -1]
            self._fetch(layer, asked_BNH, start, pads)

    def fetched(self, layer: int, q_BNCH: Tensor, start: int, pads: Sequence[int], *, room: int) -> Fetched | None:
        """The slots of a layer that new tokens attend to, the same for all of them; None is all slots.

        Args:
            room: tokens that come after the fetched ones: the new ones, and drafts before them.
        """
        if not self._chooses(layer):
            return None
        found, kept = self._indices[layer], self.pool[layer]
        asked_BNH = found.asked_BNH if q_BNCH.shape[2] == 1 else None
        if asked_BNH is None and found.asked_BNH is not None:
            self._fetches.drop(layer)  # chosen late, for one token
        if layer not in self._fetches:  # not chosen ahead, by this policy, for the first layers or in a fork
            self._indices.renew_if_old(layer, start, pads)
            q_BNH = asked_BNH
            if q_BNH is None:  # several tokens ask as if their queries were those of further heads of their groups
                asking_BNCH = q_BNCH if self.clamped is None else self.clamped.at_window(kept, q_BNCH)
                q_BNH = asking_BNCH.unflatten(1, (kept.shape.num_kv_heads, -1)).flatten(1, 3)
            self._fetch(layer, q_BNH, start, pads, num_new=room)
        chosen = self._fetches.take(layer)
        if asked_BNH is not None and chosen is not None and chosen.slots_BKm is not None:
            chosen = self._corrected(layer, chosen, asked_BNH, q_BNCH[:, :, 0], start, pads)
        slots_BKm, num_held = (None, 0) if chosen is None else (chosen.slots_BKm, chosen.num_held)
        if self.limit is not None and slots_BKm is not None:
            self.limit.note_choice(kept, slots_BKm, found.steps + 1)
        found.steps += 1
        found.resident += kept.num_slots
        found.fetched += kept.num_slots if slots_BKm is None else slots_BKm.shape[2] - num_held
        return chosen

    def _fetch(self, layer: int, q_BNH: Tensor, start: int, pads: Sequence[int], *, num_new: int = 1) -> None:
        """Choose slots for new tokens and start fetching them."""
        found, kept = self._indices[layer], self.pool[layer]
        found.append(kept)  # tokens of a turn that is not over
        slots = self._slots_at(layer, start, pads)
        choice = found.index.choose(q_BNH, slots)
        if choice is None:
            self._fetches.start(layer, kept, None, list(kept.pads), room=num_new)
            return
        chosen_pads = found.index.chosen_padding(slots, choice.slots_BKm.shape[2])
        self._fetches.start(layer, kept, choice, chosen_pads, room=num_new)

    def _corrected(
        self, layer: int, before: Fetched, asked_BNH: Tensor, q_BNH: Tensor, start: int, pads: Sequence[int]
    ) -> Fetched:
        """The choice `before` of an earlier query, and in KV heads whose own query differs from that one their own."""
        found, kept, late = self._indices[layer], self.pool[layer], self.policy.late
        assert late is not None
        alike_BN = torch.cosine_similarity(q_BNH.float(), asked_BNH.float(), dim=-1)
        again_BK = alike_BN.unflatten(1, (kept.shape.num_kv_heads, -1)).mean(dim=2) < late
        if late == 1:  # no cosine is too large, whatever its rounding
            again_BK = torch.ones_like(again_BK)
        self.await_device()
        again_x = again_BK.flatten().nonzero()[:, 0]  # for their number the host waits
        found.late_choices += again_BK.numel()
        found.chosen_again += len(again_x)
        if len(again_x) == 0:
            return before
        choice = found.index.choose(q_BNH, self._slots_at(layer, start, pads))
        assert choice is not None
        return before.with_heads(kept, choice.slots_BKm, again_BK, again_x)

    def _slots_at(self, layer: int, start: int, pads: Sequence[int]) -> Slots:
        """The slots that the policy chooses from, for the token with index `start`."""
        return self._slots(layer, self._indices.next_B(start, pads) if self._by_position(layer) else None)

    def _slots(self, layer: int, next_B: Tensor | None) -> Slots:
        """The slots that the policy chooses from, for a token at position `next_B` of each row."""
        kept = self.pool[layer]
        return Slots(
            num_slots=kept.num_slots,
            pads=kept.pads,
            positions_BKn=kept.positions_BKn() if self._by_position(layer) else None,
            next_B=next_B,
            mean_over_shares=self._mean_over_shares,
            await_device=self.await_device,
        )

    def _by_position(self, layer: int) -> bool:
        """Whether slots have to be told apart by the positions of their tokens."""
        return self._indices[layer].out_of_order or self._part is not None

    def sample_hits(self, layer: int, q_BNH: Tensor, k_BKCH: Tensor, fetched: Fetched | None, scaling: float) -> None:
        """Record the attention probability of the fetched slots, if this step is to be sampled.

        Args:
            k_BKCH: key of the new token, or of none if another rank stores it.
        """
        found, every, kept = self.layers[layer], self.policy.sample_every, self.pool[layer]
        if found is None or fetched is None or every == 0 or found.steps % every:
            return
        if fetched.slots_BKm is None:
            found.hit_mass.append(1.0)
            return
        k_BKnH, _ = kept.read()
        if self.clamped is not None:
            q_BNH, k_BKnH, k_BKCH = self.clamped.rotated(kept, q_BNH, k_BKnH, k_BKCH)
        self.await_device()
        mass = fetched.hit_mass(q_BNH, k_BKnH, k_BKCH, kept.pads, scaling)
        if mass is not None:
            found.hit_mass.append(mass)

    def store_new(
        self, layer: int, k_BKCH: Tensor, v_BKCV: Tensor, positions_BC: Tensor, new_pads: list[int], *, is_turn: bool
    ) -> None:
        """Store new tokens; in a full pool a generated one replaces another one.

        Args:
            positions_BC: positions of the new tokens in their rows.
            new_pads: number of padding tokens among them, by row.
            is_turn: they are given, and `store_prompt` adds them to the index and cuts a pool with a limit back.
        """
        found, kept, num_new = self.layers[layer], self.pool[layer], k_BKCH.shape[2]
        if found is None:
            kept.store(k_BKCH, v_BKCV, positions_BC, new_pads)
            return
        if not is_turn:
            found.age += num_new
        if self.limit is not None and self.limit.room(kept) == 0 and not is_turn:
            assert num_new == 1, num_new
            self.limit.replace(found, kept, k_BKCH, v_BKCV, positions_BC)
            return
        if self.limit is not None and not is_turn:
            self.limit.grow(kept)
        kept.store(k_BKCH, v_BKCV, positions_BC, new_pads)
        if not is_turn and kept.num_slots > self._min_tokens:
            found.append(kept, (k_BKCH, v_BKCV))

    def pass_over(self, layer: int) -> None:
        """Note a new token that another rank stores."""
        found = self.layers[layer]
        if found is not None:
            found.age += 1

    def _chooses(self, layer: int) -> bool:
        """Whether attention sees only chosen slots of a layer."""
        if layer >= len(self.layers) or self.layers[layer] is None:
            return False
        return self.pool[layer].num_slots >= self._min_tokens

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
            chosen_again=[
                None if layer is None or layer.late_choices == 0 else layer.chosen_again / layer.late_choices
                for layer in self.layers
            ],
            host_bytes=self.host_bytes,
        )
