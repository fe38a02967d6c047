"""Rows in one memory: they join, leave and move, and have the tokens that each has alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from runahead import GenerationOptions
from runahead.cache import arena as arena_module
from runahead.cache.arena import Arena, ArenaIndex, Placed
from runahead.cache.slabs import KVShape
from runahead.decoding.arena_steps import ArenaSteps
from runahead.decoding.lanes import Lanes
from runahead.decoding.rows import Rows
from tests.decoding.test_live_rows import OPTIONS, PROMPTS, Decoding, alone, engine_of
from tests.families import throughout

SHAPES = [KVShape(num_kv_heads=2, key_dim=4, value_dim=4, dtype=torch.float32)] * 2
CPU = torch.device("cpu")


@contextmanager
def smallest(num_tokens: int) -> Iterator[None]:
    """Context manager in which arenas begin with so many tokens."""
    with patch.object(arena_module, "LEAST_TOKENS", num_tokens):
        yield


def filled(arena: Arena, num_tokens: int, number: float, *, num_before: int = 0):
    """A row that enters with so many tokens, all of this number, and has room for two more."""
    parts = [torch.full((num_tokens, 2, 8), number)]
    if num_before:
        parts.insert(0, torch.full((num_before, 2, 8), -number))
    return arena.enter(num_before, num_tokens + 2, 0, lambda layer: parts)


def seen(region) -> list[float]:
    """Numbers of a row's own tokens."""
    return region.slabs.by_layer[1].slab_TBKX[:, 0, 0, 0].tolist()


def test_rows_lie_apart_and_stay_when_others_come_and_go():
    with smallest(32):
        arena = Arena(SHAPES, CPU)
        rows = [filled(arena, 5, 1.0), filled(arena, 6, 2.0), filled(arena, 4, 3.0, num_before=3)]
        assert [region.slots for region in rows] == [range(1, 8), range(8, 16), range(16, 25)]
        arena.leave(rows[1])
        new = filled(arena, 5, 4.0)  # in the place of the one that has left
        assert new.slots == range(8, 15) and arena.num_moves == 1
        assert seen(rows[0])[:5] == [1.0] * 5 and seen(rows[2])[:4] == [3.0] * 4 and seen(new)[:5] == [4.0] * 5
        assert arena.slabs.by_layer[0].slab_TBKX[16:19].eq(-3.0).all()
        assert arena.num_used == 7 + 7 + 9
        assert arena.num_bytes == 23 * 2 * 2 * 8 * 4


def test_rows_move_to_larger_memory_and_back_and_keep_what_they_store():
    with smallest(16):
        arena = Arena(SHAPES, CPU)
        rows = [filled(arena, 5, number) for number in (1.0, 2.0, 3.0, 4.0)]
        assert arena.num_slots == 32 and arena.num_moves == 2
        arena.leave(rows[0])
        arena.leave(rows[2])
        arena.trim()
        assert arena.num_slots == 16 and [rows[n].slots for n in (1, 3)] == [range(1, 8), range(8, 15)]
        assert seen(rows[1])[:5] == [2.0] * 5 and seen(rows[3])[:5] == [4.0] * 5
        rows[3].slabs.by_layer[0].slab_TBKX[5:] = 9.0  # a view of the new memory
        assert arena.slabs.by_layer[0].slab_TBKX[13:15].eq(9.0).all()


def test_rows_in_pieces_of_free_slots_move_side_by_side():
    with smallest(32):
        arena = Arena(SHAPES, CPU, most_tokens=31)
        rows = [filled(arena, 4, number) for number in (1.0, 2.0, 3.0, 4.0, 5.0)]
        arena.leave(rows[1])
        arena.leave(rows[3])
        new = filled(arena, 11, 6.0)
        assert new.slots == range(19, 32) and arena.num_slots == 32 and arena.num_moves == 2
        assert seen(rows[4])[:4] == [5.0] * 4
        assert filled(arena, 1, 7.0) is None, "there is no room, and may be none"


@pytest.mark.parametrize("has_graphs", [False, True])
def test_memory_is_given_back_with_the_last_row_unless_graphs_hold_it(has_graphs):
    steps = ArenaSteps.of(engine_of("llama").model, None)
    steps._has_graphs = has_graphs
    region = steps.arena.enter(0, 5, 0, lambda layer: [])
    steps.leave(region)
    assert (steps.arena.num_slots > 0) == has_graphs and steps.arena.num_bytes == 0


def test_a_step_is_told_where_rows_lie_once_and_advances_by_itself():
    """Numbers by hand; what fills it up stays in the first slot."""
    arena, index = Arena(SHAPES, CPU), ArenaIndex(4, 64, CPU)
    first, second = filled(arena, 5, 1.0), filled(arena, 6, 2.0, num_before=10)

    def numbers() -> list[list[int]]:
        lengths = index._lengths
        return [index._next_S.tolist(), index._position_S.tolist(), lengths.starts.tolist(), lengths.seen_S.tolist()]

    index.place([Placed(first, 5), Placed(second, 6)])
    assert numbers() == [[6, 24, 0, 0], [5, 6, 0, 0], [1, 8, 0, 0, 0], [6, 17, 1, 1]]
    index.advance()
    with patch.object(arena_module, "sent", side_effect=AssertionError):
        index.place([Placed(first, 6), Placed(second, 7)])  # as it has advanced
    assert numbers() == [[7, 25, 0, 0], [6, 7, 0, 0], [1, 8, 0, 0, 0], [7, 18, 1, 1]]
    index.advance()
    index.place([Placed(second, 6)])
    assert numbers() == [[24, 0, 0, 0], [6, 0, 0, 0], [8, 0, 0, 0, 0], [17, 1, 1, 1]]


def replayed(engine, **options) -> Decoding:
    """Rows whose steps are of fixed shape, as on a GPU."""
    decoding = Decoding(engine)
    decoding.live = Rows(Lanes(engine.model, **options))
    assert decoding.live._lanes._arena is not None
    decoding.live._lanes._arena._has_graphs = True
    return decoding


@pytest.mark.parametrize("least", [16, 4096], ids=["moving", "staying"])
@pytest.mark.parametrize("replays", [False, True], ids=["together", "replayed"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_of_an_arena_have_the_tokens_that_each_has_alone(family, replays, least):
    """It fails with the lengths of other rows, with slots that stay where rows were, and without moving rows' views."""
    engine = engine_of(family)
    with throughout(engine.model.dtype), smallest(least):
        expected = alone(engine)
        decoding = replayed(engine) if replays else Decoding(engine)
        decoding.join(0)
        decoding.step(3)
        decoding.join(1, 2)
        decoding.step(2)
        decoding.join(3)
        decoding.step(12)
    assert [decoding.tokens[row] for row in range(4)] == expected


WRONG = {
    "a row less": lambda rows: [rows[0], *rows[:-1]],
    "a token less": lambda rows: [row._replace(num_stored=row.num_stored - 1) for row in rows],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_places_have_other_tokens(wrong):
    engine, place = engine_of("llama"), ArenaIndex.place
    with throughout(engine.model.dtype):
        expected, decoding = alone(engine), Decoding(engine)

        def misplaced(index, rows, **how):
            place(index, WRONG[wrong](rows), **how)

        with patch.object(ArenaIndex, "place", misplaced):
            decoding.join(0, 1, 2)
            decoding.step(12)
    assert [decoding.tokens[row] for row in range(3)] != expected[:3]


@pytest.mark.parametrize("least", [16, 4096], ids=["moving", "staying"])
def test_rows_with_and_without_a_place_are_decoded_in_one_forward(least):
    engine = engine_of("llama")
    with throughout(engine.model.dtype), smallest(least):
        expected, decoding = alone(engine), Decoding(engine)
        room = sum(len(PROMPTS[row]) + OPTIONS[row].max_new_tokens for row in (0, 2, 3))
        decoding.live = Rows(Lanes(engine.model, most_tokens=room))
        for row in (0, 2, 1, 3):  # for the third there is no room
            decoding.join(row)
        lanes = decoding.live._lanes
        assert [lanes.lane(row).region is None for row in range(4)] == [False, True, False, False]
        with patch.object(engine.model, "forward", wraps=engine.model.forward) as forwards:
            decoding.step(2)
        assert forwards.call_count == 2
        decoding.step(12)
    assert [decoding.tokens[row] for row in range(4)] == expected


def test_a_row_that_is_cut_short_leaves_its_place_to_others():
    engine = engine_of("llama")
    with throughout(engine.model.dtype):
        expected, decoding = alone(engine), Decoding(engine)
        decoding.join(0, 1)
        decoding.step(2)
        place = decoding.live._lanes.lane(1).region.slots
        decoding.live.cancel([1])
        decoding.join(3)
        assert decoding.live._lanes.lane(3).region.slots.start == place.start
        decoding.step(12)
    assert [decoding.tokens[row] for row in (0, 3)] == [expected[0], expected[3]]


@pytest.mark.parametrize("family", ["mistral", "gemma2", "bloom", "llama_dynamic_ntk", "qwen3_next", "bart"])
def test_models_whose_steps_differ_have_no_arena(family):
    assert ArenaSteps.of(engine_of(family).model, None) is None


def test_a_step_is_for_the_next_power_of_two_of_rows():
    engine = engine_of("llama")
    with throughout(engine.model.dtype):
        decoding = replayed(engine)
        sizes = list[int]()
        forward = engine.model.forward

        def counting(ids_BC, *args, **more):
            sizes.append(len(ids_BC))
            return forward(ids_BC, *args, **more)

        with patch.object(engine.model, "forward", counting):
            decoding.join(0, 1, 2)
            sizes.clear()
            decoding.step(2)
            decoding.live.cancel([1, 2])
            decoding.step(1)
    assert sizes == [4, 4, 1]


def test_rows_that_were_given_drafts_go_on_in_their_places():
    """Drafts are verified row by row over the same memory."""
    engine = engine_of("llama")
    options = replace(GenerationOptions(max_new_tokens=9, ignore_eos=True))
    with throughout(engine.model.dtype):
        [alone_] = engine.generate([PROMPTS[0]], [options]).generations
        decoding = Decoding(engine)
        decoding.join(0, 1)
        lanes, row = decoding.live._lanes, decoding.live._rows[0]
        draft = [row.ids[-1], *alone_.new_token_ids[1:3], 5]
        logits = lanes.verify({0: draft})[0]
        assert logits.argmax(dim=-1).tolist()[:2] == alone_.new_token_ids[1:3]
        lanes.take_back(0, 4)
        decoding.step(12)
    assert decoding.tokens[0] == alone_.new_token_ids
