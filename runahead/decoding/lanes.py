"""`Lanes`: where the keys and values of rows are that are decoded together, and the forwards over them."""

# Legend: B rows of a forward, C tokens of it, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from policies.base import Policy
from policies.row_values import row_values, sent
from runahead.attention.base import LayerAttention
from runahead.attention.states import States
from runahead.cache.arena import Placed, Region
from runahead.cache.attention import CausalAttention, End
from runahead.cache.base import Gather, KVStore
from runahead.cache.rows import RowsAttention
from runahead.cache.slabs import Slabs
from runahead.decoding.arena_steps import ArenaSteps
from runahead.decoding.forward import (
    Forward,
    agreed,
    forward_one_by_one,
    forward_over,
    logits_of,
    token_attention,
)
from runahead.decoding.row import Row, RowId
from runahead.model.model import Model
from runahead.reuse.cache import reused_by
from runahead.reuse.forks import fork
from runahead.reuse.rows import SharedParts, apart_from_shared
from runahead.thinning.rank_policies import RankPolicies

MOST_SHARED = 1024
"""Tokens beyond which a CPU reads what several rows reuse once for all of them, rather than a copy for each."""

MOST_AGAIN = 8
"""Tokens from which on those that come again have a forward of their own, after which they are done with. A forward of
few tokens reads the weights as one of a single token does."""


@dataclass(eq=False, kw_only=True)
class Lane:
    """Where the keys and values of a row are.

    Attributes:
        cache: of this row alone; before the rows of a batch are told apart, of the batch.
        num_tokens: tokens that the cache stores, without padding.
        num_shared: tokens before them that other rows of the same prompt share, after those that the prompt reused.
        prompt_tokens: number of tokens of the prompt, of which policies keep a share.
        pad: left padding with which policies count the row's tokens, as in the batch that it began in.
        is_long: its keys are rotated by LongRoPE's tables for long texts.
        take_back: takes tokens of the last forward back, with what policies decided after them; None: the cache does.
        kept: states of the row as they were before the tokens of `since`; None: none were kept, or it has none.
        since: tokens that were stored since.
        again: tokens of the row after those that are stored: right ones of a draft that was taken back with them.
        states: of a row that has left, until the next forward; None: no layer holds any.
        region: its place in the arena of rows, if it has one. The cache is of its own tokens there.
    """

    cache: KVStore
    num_tokens: int
    prompt_tokens: int
    num_shared: int = 0
    pad: int = 0
    is_long: bool = False
    take_back: Callable[[int], None] | None = None
    kept: States | None = None
    since: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    states: States | None = None
    region: Region | None = None

    @property
    def placed(self) -> Placed:
        """The row in a step of rows of the arena."""
        assert self.region is not None, "it has memory of its own"
        return Placed(self.region, self.num_tokens)

    @property
    def num_after_prefix(self) -> int:
        """Tokens of the row's text that are stored after those that its prompt reused."""
        return self.num_shared + self.num_tokens

    def to_feed(self, ids: Sequence[int]) -> list[int]:
        """The tokens that a forward of these has to compute."""
        return [*self.again, *ids]

    def note(self, fed: Sequence[int]) -> None:
        """Note the tokens that a forward has stored."""
        self.num_tokens += len(fed)
        self.again = []
        if self.kept is not None:
            self.since += fed


@dataclass(kw_only=True)
class _Batch:
    """Rows that began together, in one cache.

    Attributes:
        cache: of all rows.
        forward: of one token of every row, also of those that left: with fewer rows it would round differently.
        pads: left padding of each row.
        last_ids: the last token of each row.
        left: rows that left.
        is_split: every lane has the cache of its row, in the same memory.
        is_in_step: one forward over `cache` takes a step of all rows.
        is_parted: the rows may advance by different numbers of tokens.
    """

    cache: KVStore
    forward: Forward
    pads: dict[RowId, int]
    last_ids: dict[RowId, int]
    left: set[RowId] = field(default_factory=set)
    is_split: bool = False
    is_in_step: bool = True
    is_parted: bool = False


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Rows that one forward computes.

    Attributes:
        lanes: of the rows.
        num_inside: the first of them, which have one attention over the arena.
        caches: of the rows, without what several of them see.
        shared: what several of the others see; None if there is nothing.
        gather: between the ranks that each store a part of the rows; None: all is here.
        ends: where a forward ends, if this rank needs no logits.
        states: of several rows, in one memory.
    """

    rows: list[RowId]
    lanes: list[Lane]
    num_inside: int
    caches: list[KVStore]
    shared: SharedParts | None
    gather: Gather | None = None
    ends: End | None = None
    states: States | None = None

    def attention(
        self,
        of_row: Callable[[Lane, KVStore], CausalAttention],
        counts: Sequence[int] | None = None,
        arena: ArenaSteps | None = None,
    ) -> LayerAttention:
        """Attention of the next tokens of all rows.

        Args:
            of_row: makes that of a row alone.
            counts: as of `RowsAttention`.
            arena: has those that are inside.
        """
        apart = list(zip(self.lanes, self.caches, strict=True))[self.num_inside :]
        rows = [of_row(lane, cache) for lane, cache in apart]
        if self.num_inside:
            assert arena is not None, self.num_inside
            rows.insert(0, arena.attention([lane.placed for lane in self.lanes[: self.num_inside]]))
        if len(rows) == 1 and self.gather is None:
            return rows[0]
        shared, gather = self.shared, self.gather
        return RowsAttention(rows, counts=counts, shared=shared, gather=gather, ends=self.ends, states=self.states)


class Lanes:
    """The keys and values of rows that are decoded together, though they may begin, advance and end differently.

    One forward computes all rows, so the weights are read once; attention and cache policies go row by row, but for
    rows in an arena (`ArenaSteps`): those that join, of models whose steps are of fixed shape, without policies, and
    without memory that they share (answers to one prompt, on a CPU long prefixes). Others join as they are. Of a model
    that counts positions from the start of the batch, rows of the same length share a forward. Drafts are verified by a
    forward for each row where every token of them changes what the next ones see: where policies decide on it, or older
    ones are quantised. The rows of one batch (`holding`) have the forward of their whole cache until one gets ahead of
    the others, and beyond that where it is of fixed shape, so that a GPU replays a graph.

    A state forgets no tokens. So where a draft may follow, the states are kept as they are before it (`keep`). If some
    of it is wrong, all of it is taken back, and its right tokens come once more with the next ones: in a forward of
    some more tokens, and in one of their own only once there are MOST_AGAIN. Rows with states that are given different
    numbers of tokens have a forward for each number, since what fills up a row would enter its state.

    Args:
        policies: of rows that join.
        most_tokens: as of `Arena`.
    """

    def __init__(self, model: Model, policies: RankPolicies | None = None, *, most_tokens: int | None = None) -> None:
        self._model, self._policies, self._longest_short = model, policies or RankPolicies(), model.length_threshold
        self._deciding: Sequence[Policy] = self._policies.while_decoding
        self._ends: End | None = None
        self._length = 0
        self._lanes: dict[RowId, Lane] = {}
        self._batch: _Batch | None = None
        self._groups: list[_Group] = []
        self._arena = None if self._policies else ArenaSteps.of(model, most_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches, of what rows share once; without what is left of a batch's when its rows have moved."""
        of_batch = 0 if self._batch is None else self._batch.cache.num_bytes
        if self._batch is not None and not self._batch.is_split:
            return of_batch
        if self._batch is not None:
            of_batch -= self._batch.cache.state_bytes  # which its rows have, too
        caches = [each.cache for each in self._lanes.values() if each.region is None]
        in_arena = 0 if self._arena is None else self._arena.arena.num_bytes
        shared = {id(cache.shared_TKX): cache.shared_TKX for cache in caches}
        shared_bytes = sum(layer_TKX.nbytes for layers_TKX in shared.values() for layer_TKX in layers_TKX)
        kv_bytes = sum(cache.num_bytes - cache.state_bytes for cache in caches) + shared_bytes + in_arena
        return max(of_batch, kv_bytes) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of rows that are told apart, as they are and as they are kept."""
        kept = sum(each.kept.num_bytes for each in self._lanes.values() if each.kept is not None)
        return kept + sum(each.cache.state_bytes for each in self._lanes.values())

    @property
    def warm_up(self) -> int:
        """Plain steps after which one takes the time that later ones take."""
        is_repeated = self._replays if self._batch is None else self._batch.cache.repeats_steps
        return 4 if is_repeated else 2  # a graph is captured in the third

    @property
    def _replays(self) -> bool:
        """Whether steps of rows that join are replayed."""
        return self._arena is not None and self._arena.replays

    @classmethod
    def holding(
        cls,
        model: Model,
        ids: Sequence[RowId],
        cache: KVStore,
        forward: Forward | None = None,
        *,
        pads: list[int],
        num_tokens: int,
        deciding: Sequence[Policy] = (),
        is_told: bool = False,
        length: int = 0,
    ) -> Lanes:
        """The lanes of one batch, which no other row joins.

        Args:
            cache: of the batch.
            forward: over it, of one token per row; by default without policies.
            pads: left padding per row.
            num_tokens: number of tokens of the padded prompt.
            deciding: the policies that decide after each token.
            is_told: another rank chooses the tokens, so that this one needs no logits.
            length: tokens that the padded text will have at least, for RoPE that depends on it.
        """
        lanes = cls(model)
        lanes._length = length
        lanes._deciding, lanes._ends = deciding, model.last_attention if is_told else None
        for id, pad in zip(ids, pads, strict=True):
            counted_pad = pad if deciding else 0
            lane = Lane(cache=cache, num_tokens=num_tokens - pad, prompt_tokens=num_tokens, pad=counted_pad)
            lanes._lanes[id] = lanes._rotated(lane, length=length - pad)
        lanes._batch = _Batch(
            cache=cache,
            forward=forward or forward_over(model, cache, [], pads=pads, prompt_tokens=num_tokens),
            pads=dict(zip(ids, pads, strict=True)),
            last_ids=dict.fromkeys(ids, 0),
        )
        return lanes

    @classmethod
    def of_rows(cls, model: Model, caches: Mapping[RowId, KVStore], num_tokens: Mapping[RowId, int]) -> Lanes:
        """The lanes of rows with caches of their own, each of which stores so many tokens."""
        lanes = cls(model)
        for id, cache in caches.items():
            lanes._lanes[id] = Lane(cache=cache, num_tokens=num_tokens[id], prompt_tokens=num_tokens[id])
        return lanes

    def join(
        self,
        ids: Sequence[RowId],
        rows: Sequence[Row],
        cache: KVStore,
        lengths: Sequence[int],
        prompt_of: Sequence[int],
    ) -> None:
        """Take rows after their prompts; arguments as of `Rows.join`. The cache is not to be used any more."""
        assert self._batch is None, "rows of a batch do not go with others"
        pads = [max(lengths) - length for length in lengths]
        given = cache.split(pads) if self._arena is not None else [None] * len(pads)
        alone = cache.slabs if len(lengths) == 1 else None  # else other rows have the rest of that memory
        outside = list[KVStore]()
        joining: dict[int, Lane] = {}
        for number, length in enumerate(lengths):
            places = [row for row, its_prompt in enumerate(prompt_of) if its_prompt == number]
            if len(places) == 1:
                inside = self._entered(given[number], rows[places[0]], length, alone)
                if inside is not None:
                    joining[places[0]] = inside
                    continue
            outside = outside or cache.for_decoding().split(pads)
            own, num_shared = [outside[number]], 0
            if len(places) > 1:
                num_new = max(rows[row].num_left for row in places) - 1  # the last one is not stored
                own, num_shared = fork(own[0], len(places), self._model, num_tokens=length, num_new=num_new)
            for row, each in zip(places, own, strict=True):
                prompt_tokens, num_tokens = len(rows[row].ids), length - num_shared
                lane = Lane(cache=each, num_tokens=num_tokens, prompt_tokens=prompt_tokens, num_shared=num_shared)
                joining[row] = self._rotated(lane)
        self._lanes |= {id: joining[row] for row, id in enumerate(ids)}
        self._groups = []

    def _entered(self, cache: KVStore | None, row: Row, num_tokens: int, memory: Slabs | None) -> Lane | None:
        """The lane of a row that is copied into the arena, as `ArenaSteps.enter`; None if it stays where it is."""
        if self._arena is None or cache is None or self._is_read_once(cache):
            return None
        found = self._arena.enter(cache, num_tokens=num_tokens, num_new=row.num_left, given=memory)
        if found is None:
            return None
        region, own = found
        return self._rotated(Lane(cache=own, num_tokens=num_tokens, prompt_tokens=len(row.ids), region=region))

    def _is_read_once(self, cache: KVStore) -> bool:
        """Whether a step should read what this row reuses once for all rows that reuse it, as `SharedParts` do."""
        reused = reused_by(cache)
        if reused is None or self._model.device.type != "cpu":  # a GPU's launches cost more than reading copies does
            return False
        others = [reused_by(lane.cache) for lane in self._lanes.values()]
        seen = {part.layers_TKX[0].data_ptr() for other in others if other is not None for part in other.parts}
        shared = [part for part in reused.parts if part.layers_TKX[0].data_ptr() in seen]
        return sum(len(part.positions_T) for part in shared) > MOST_SHARED

    def trim(self, num_tokens: int, most_tokens: int) -> None:
        """Give back memory of the arena that no row needs, if it and so many tokens are more than there may be.

        Args:
            num_tokens: of all rows, those in the arena among them.
        """
        if self._arena is not None:
            arena = self._arena.arena
            if num_tokens + arena.num_slots - arena.num_used > most_tokens:
                self._arena.trim()

    def leave(self, row: RowId, last_id: int) -> Lane:
        """Let a row leave whose last token is this one. In a batch its memory stays."""
        lane, batch = self._lanes[row], self._batch
        lane.states, lane.kept, lane.since = lane.cache.states, None, []  # nothing is taken back any more
        if batch is not None:
            batch.last_ids[row] = last_id
            batch.left.add(row)
            if lane.states is not None and not batch.is_split:
                lane.states = lane.states.row(list(batch.pads).index(row))
            return lane
        self._groups = []
        if lane.region is not None and self._arena is not None:
            self._arena.leave(lane.region)
        return self._lanes.pop(row)

    def outgrown(self, rows: Iterable[RowId]) -> list[RowId]:
        """Rows whose next tokens LongRoPE rotates by other tables than their keys. Those of a batch go together."""
        if self._longest_short is None:
            return []
        rows = list(rows)
        found = [row for row in rows if self._left_as_short(row) == 0]
        return rows if found and self._batch is not None else found

    def most_at_once(self, rows: Iterable[RowId]) -> int | None:
        """Most tokens of a forward of rows that have not outgrown their tables; None is any number."""
        left = [self._left_as_short(row) for row in rows] if self._longest_short is not None else []
        return min((each for each in left if each is not None), default=None)

    def _left_as_short(self, row: RowId) -> int | None:
        """Tokens until LongRoPE has other tables for a row; None if it never has."""
        lane, longest = self._lanes[row], self._longest_short
        return None if lane.is_long or longest is None else longest - lane.num_tokens - len(lane.again)

    def _rotated(self, lane: Lane, length: int = 0) -> Lane:
        """The lane of a text that was computed as one prompt, or as the beginning of a text of some length."""
        lane.is_long = self._longest_short is not None and max(lane.num_tokens, length) > self._longest_short
        return lane

    def release(self) -> None:
        """Forget all rows, so that their memory is freed."""
        for lane in self._lanes.values():
            if lane.region is not None and self._arena is not None:
                self._arena.leave(lane.region)
        self._lanes, self._batch, self._groups = {}, None, []

    def lane(self, row: RowId) -> Lane:
        """The memory of a row."""
        batch = self._batch
        if batch is not None and not batch.is_split:
            batch.is_split = True
            caches = batch.cache.split(list(batch.pads.values()))
            for lane, cache in zip(self._lanes.values(), caches, strict=True):
                lane.cache = cache
        return self._lanes[row]

    def plain(self, last_ids: Mapping[RowId, int]) -> tuple[list[RowId], Tensor]:
        """Logits (B, V) after the last token of each row, which is stored, and the rows of them.

        Rows that left their batch may be among these.
        """
        if any(self._lanes[row].again for row in last_ids):
            computed = self.verify({row: [id] for row, id in last_ids.items()})
            return list(computed), torch.cat(list(computed.values()))
        if self._batch is not None and self._batch.is_in_step:
            return self._in_step(self._batch, last_ids)
        lanes = [self._lanes[row] for row in last_ids]
        if self._replays and all(lane.region is not None for lane in lanes):
            return list(last_ids), self._replayed(lanes, list(last_ids.values()))
        model, policies, found = self._model, self._deciding, list[tuple[list[RowId], Tensor]]()

        def of_row(lane: Lane, cache: KVStore) -> CausalAttention:
            start, prompt_tokens = self._place(lane), lane.prompt_tokens
            return token_attention(model, cache, policies, start=start, pads=[lane.pad], prompt_tokens=prompt_tokens)

        for group in self._groups_of(last_ids):
            attention = group.attention(of_row, arena=self._arena)
            ids_B1 = self._ids(last_ids[row] for row in group.rows)
            with model.ranges("decoding step"):
                found.append((group.rows, logits_of(model, ids_B1, attention, length=self._length)))
        for row, last_id in last_ids.items():
            self._lanes[row].note([last_id])
        if len(found) == 1:
            return found[0]
        return [*chain.from_iterable(rows for rows, _ in found)], torch.cat([logits_BV for _, logits_BV in found])

    def verify(self, ids: Mapping[RowId, Sequence[int]]) -> dict[RowId, Tensor]:
        """Logits (C, V) of rows after each of these tokens, which are stored."""
        self.part()
        fed = {row: self._lanes[row].to_feed(of_row) for row, of_row in ids.items()}
        found: dict[RowId, Tensor] = {}
        for group in self._groups_of(fed, {row: len(of_row) for row, of_row in fed.items()}):
            if self._deciding or group.caches[0].changes_as_it_grows:
                found |= {row: self._verified_in_turn(self.lane(row), fed[row]) for row in group.rows}
            else:
                found |= zip(group.rows, self._verified(group, [fed[row] for row in group.rows]), strict=True)
        for row, of_row in fed.items():
            self._lanes[row].note(of_row)
        return {row: found[row][len(fed[row]) - len(of_row) :] for row, of_row in ids.items()}

    def keep(self, rows: Iterable[RowId]) -> None:
        """Keep the states of rows as they are, so that tokens that follow can be taken back."""
        if self._model.held is None:
            return
        rows = list(rows)
        self.recompute([row for row in rows if len(self._lanes[row].again) >= MOST_AGAIN])
        for row in rows:
            lane = self.lane(row)
            states = lane.cache.states
            assert states is not None, "all layers that hold a state have one"
            if lane.kept is None:
                lane.kept = states.fork()
            elif lane.since:
                lane.kept.copy_from(states)
            lane.since = []

    def recompute(self, rows: Iterable[RowId] | None = None) -> None:
        """Compute the tokens of rows, by default of all, that were taken back though they are right."""
        rows = self._lanes if rows is None else rows
        if again := {row: self._lanes[row].again for row in rows if self._lanes[row].again}:
            self.verify({row: [] for row in again})

    def part(self) -> None:
        """From now on rows may advance by different numbers of tokens."""
        batch = self._batch
        if batch is None or batch.is_parted or len(batch.pads) == 1:  # a single row has nothing to be in step with
            return
        batch.is_parted, batch.is_in_step = True, batch.cache.repeats_steps
        if batch.cache.gather is not None:  # the ranks take the same forwards
            all_repeat_1 = agreed(batch.cache, self._model, is_fine=batch.is_in_step)
            batch.cache.await_device()
            batch.is_in_step = bool(all_repeat_1.item())

    def take_back(self, row: RowId, num: int) -> None:
        """Forget the last tokens of a row, so that others are stored in their place."""
        take_back, self._lanes[row].take_back = self._lanes[row].take_back, None
        if not num:
            return
        lane = self.lane(row)
        if lane.cache.states is not None:
            assert lane.kept is not None, "a state forgets no tokens; keep() comes before the forward"
            taken = [*lane.since, *lane.again]
            assert num <= len(taken), f"{num} tokens cannot be taken back: states were kept {len(taken)} tokens ago"
            right = taken[:-num]
            num, lane.again = len(lane.since), right
            if not num:  # they were taken back before
                return
            lane.cache.states.copy_from(lane.kept)
            lane.since = []
        self.set_stored(row, lane.num_tokens - num)
        (take_back or lane.cache.take_back)(num)

    def set_stored(self, row: RowId, num: int, states: States | None = None) -> None:
        """Note how many tokens of a row are stored.

        Args:
            states: of another memory, after these tokens: they are copied, and take the place of the row's own.
        """
        lane = self._lanes[row]
        lane.num_tokens = num
        if states is not None:
            assert lane.cache.states is not None
            lane.cache.states.copy_from(states)
            lane.kept, lane.since, lane.again = None, [], []

    def _replayed(self, lanes: Sequence[Lane], last_ids: Sequence[int]) -> Tensor:
        """Logits (B, V) of a plain step of rows of the arena."""
        assert self._arena is not None, "it has the rows"
        logits_BV = self._arena.step([lane.placed for lane in lanes], last_ids)
        for lane, last_id in zip(lanes, last_ids, strict=True):
            lane.note([last_id])
        return logits_BV

    def _in_step(self, batch: _Batch, last_ids: Mapping[RowId, int]) -> tuple[list[RowId], Tensor]:
        """A plain step of all rows of a batch, also of those that left."""
        batch.last_ids |= last_ids
        lanes = list(self._lanes.values())
        if batch.cache.repeats_steps:
            batch.cache.set_lengths([lane.num_tokens for lane in lanes])
        start = max(lane.num_tokens + pad for lane, pad in zip(lanes, batch.pads.values(), strict=True))
        logits_BV = batch.forward(self._ids(batch.last_ids.values()), start)
        for row, lane in self._lanes.items():
            if row in last_ids or row in batch.left:
                lane.note([batch.last_ids[row]])
        return list(self._lanes), logits_BV

    def _verified(self, group: _Group, ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits (C, V) of rows after each of some tokens, which are stored, by one forward."""
        model, longest = self._model, max(map(len, ids))

        def of_row(lane: Lane, cache: KVStore) -> CausalAttention:
            return CausalAttention(cache, start=lane.num_tokens, pads=[0])

        attention = group.attention(of_row, [len(row_ids) for row_ids in ids])
        filled = [[*row_ids, *[0] * (longest - len(row_ids))] for row_ids in ids]
        ids_BC = sent(torch.tensor(filled), model.device)
        with model.ranges("verification of", longest, "tokens"):
            logits_BCV = logits_of(model, ids_BC, attention, all_logits=True, length=self._length)
        return [logits_CV[: len(row_ids)] for row_ids, logits_CV in zip(ids, logits_BCV, strict=True)]

    def _verified_in_turn(self, lane: Lane, ids: Sequence[int]) -> Tensor:
        """Logits (C, V) after each of some tokens of a row that each change what those after them see of the others."""
        model, cache, pads, start = self._model, lane.cache, [lane.pad], self._place(lane)
        ids_1C = sent(torch.tensor([list(ids)]), model.device)
        with model.ranges("verification of", len(ids), "tokens"), cache.remembering() as lane.take_back:
            given = {"prompt_tokens": lane.prompt_tokens, "length": self._length}
            [logits_CV] = forward_one_by_one(model, cache, self._deciding, ids_1C, start=start, pads=pads, **given)
        return logits_CV

    def _place(self, lane: Lane) -> int:
        """Index of a row's next token, with the padding from which policies count."""
        return lane.num_tokens + lane.pad

    def _groups_of(self, rows: Iterable[RowId], counts: Mapping[RowId, int] | None = None) -> list[_Group]:
        """Rows by the forward that computes them; groups are remembered from step to step.

        Args:
            counts: number of tokens of each row; None is one of each.
        """
        alike: dict[tuple[int | None, int | None], list[RowId]] = {}
        counts_itself, has_states = self._model.uneven_limit is not None, self._model.held is not None
        rows = list(rows)
        inside = [row for row in rows if self._lanes[row].region is not None] if counts is None else []
        num_inside = len(inside) if len(inside) > 1 else 0
        if num_inside:  # and of their models all rows go together
            rows = [*inside, *(row for row in rows if self._lanes[row].region is None)]
        for row in rows:
            stored = self._lanes[row].num_tokens if counts_itself else None
            count = counts[row] if counts is not None and has_states else None
            alike.setdefault((stored, count), []).append(row)
        known = {(group.num_inside, *group.rows): group for group in self._groups}
        self._groups = [
            known.get((num_inside, *together)) or self._group(together, num_inside) for together in alike.values()
        ]
        return self._groups

    def _group(self, rows: list[RowId], num_inside: int) -> _Group:
        lanes = [self.lane(row) for row in rows]
        caches, shared = apart_from_shared([lane.cache for lane in lanes], first=num_inside)
        gather = None if self._batch is None else self._batch.cache.gather
        of_rows = [lane.cache.states for lane in lanes if lane.cache.states is not None]
        states = None
        if len(of_rows) > 1 or any(each.is_part for each in of_rows):  # memory that rows which left had is free then
            states = States.together(of_rows)
            self._note_moved(rows, states)
        return _Group(
            rows=rows,
            lanes=lanes,
            num_inside=num_inside,
            caches=caches,
            shared=shared,
            gather=gather,
            ends=self._ends,
            states=states,
        )

    def _note_moved(self, rows: list[RowId], states: States) -> None:
        """Let go of the memory that the states of a batch had before those of these rows moved."""
        if self._batch is None:
            return
        self._batch.cache.states = states if rows == list(self._batch.pads) else None
        for row in self._batch.left:
            self._lanes[row].states = self._lanes[row].cache.states = None

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return row_values(list(ids), self._model.device)[:, None]
