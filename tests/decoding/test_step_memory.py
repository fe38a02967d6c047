"""Memory that recorded steps and the arena of rows hold: it is free at once where nothing needs it any more."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from runahead import Engine, GenerationOptions
from runahead.cache.arena import Arena, Region
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import KVSlab, Slabs
from runahead.config import Device, RanksOptions
from runahead.decoding.lanes import Lanes
from runahead.decoding.recorded import Program, recorded
from runahead.decoding.row import Row
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from tests.decoding.test_arena import smallest
from tests.decoding.test_recorded import (
    NEW,
    TOLERANCE,
    built,  # noqa: F401 (a fixture)
    in_use,  # noqa: F401
    model_of,
    program_of,
    prompt_of,
    replaying,
    rows_alone,
    stepped,
)

pytestmark = pytest.mark.usefixtures("built", "in_use")


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is recorded, so that few are enough."""
    monkeypatch.setattr("runahead.decoding.recorded.UNRECORDED", 0)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Memory that only the garbage collector frees stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def held(x: Tensor) -> Callable[[], bool]:
    """Tells whether anything, also in C++, still has a tensor's memory."""
    memory = StorageWeakRef(x.untyped_storage())
    return lambda: not memory.expired()


def held_layers(by_layer: Sequence[KVSlab]) -> Callable[[], list[bool]]:
    each_layer = [held(slab.slab_TBKX) for slab in by_layer]
    return lambda: [layer() for layer in each_layer]


def in_turn(num_layers: int) -> list[list[bool]]:
    """Layers that are held when one after another is copied: that one and those after it."""
    return [[layer >= copied for layer in range(num_layers)] for copied in range(num_layers)]


def join(lanes: Lanes, model: Model, number: int, length: int, *, num_new: int = 2 * NEW) -> None:
    options = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
    row = Row(model, list(range(3, 3 + length)), options, seed=0)
    lanes.join([(number, 0)], [row], prompt_of(model, length), [length], [0])


def step(lanes: Lanes, ids: Sequence[int], num_rows: int) -> Tensor:
    """Logits (rows, ids, V) after these tokens, which are the same in all rows."""
    found = list[Tensor]()
    for id in ids:
        order, logits_BV = lanes.plain({(number, 0): id for number in range(num_rows)})
        assert order == [(number, 0) for number in range(num_rows)]
        found.append(logits_BV[:num_rows].clone())
    return torch.stack(found, dim=1)


def test_a_prompts_memory_is_free_with_its_forward() -> None:
    forward, following = replaying(model_of("llama"), [0])
    stepped(forward, following)
    program_of(forward)
    assert forward._cache.slabs is not None
    layers = held_layers(forward._cache.slabs.by_layer)
    assert all(layers())
    del forward
    assert not any(layers())


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_an_answers_memory_is_free_once_it_is_given(num_prompts: int) -> None:
    """Also what rows of different lengths were moved into; it fails where a step's forward holds itself."""
    model, layers, make = model_of("llama"), list[Callable[[], bool]](), KVCache.__init__

    def noting(cache: KVCache, slabs: Slabs, *args: Any, **more: Any) -> None:
        layers.extend(held(slab.slab_TBKX) for slab in slabs.by_layer)
        make(cache, slabs, *args, **more)

    engine = Engine(model, Ranks.start(RanksOptions(device=Device.cpu)))
    options = GenerationOptions(max_new_tokens=NEW, ignore_eos=True)
    replay, calls = Program.__call__, list[int]()
    with (
        patch.object(KVCache, "__init__", noting),
        patch.object(Program, "__call__", lambda program: calls.append(0) or replay(program)),
    ):
        engine.generate([[5, 9, 6, 7, 8, 4], [5, 9, 6]][:num_prompts], [options] * num_prompts)
    assert calls and layers and not any(layer() for layer in layers)


@pytest.mark.parametrize("error", [KeyError("of the model"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_step_that_fails_leaves_nothing(error: BaseException) -> None:
    made = list[Callable[[], bool]]()

    def failing() -> Tensor:
        x = torch.ones(3) * 2
        made.append(held(x))
        raise error

    with suppress(KeyError, KeyboardInterrupt):
        recorded(failing)
    error.__traceback__ = None
    assert [each() for each in made] == [False]
    assert isinstance(recorded(lambda: torch.ones(3) + 1)[1], Program)


@pytest.mark.parametrize("wrong", [False, True])
def test_an_arena_that_moves_frees_each_layer_once_it_is_copied(wrong: bool) -> None:
    """Also where a step of its rows is replayed; it fails where that is forgotten later."""
    model, view, noted = model_of("llama"), Region.view, list[list[bool]]()
    lanes = Lanes(model)
    assert lanes._arena is not None
    with smallest(16):
        join(lanes, model, 0, 11)
        step(lanes, [5, 9, 6], 1)
        layers = held_layers(lanes._arena.arena.slabs.by_layer)
        if wrong:
            lanes._arena.arena._let_go = lambda: None

        def noting(region: Region, slab: KVSlab) -> KVSlab:
            noted.append(layers())
            return view(region, slab)

        with patch.object(Region, "view", noting):
            join(lanes, model, 1, 7)
    num_layers = len(layers())
    assert (noted[:num_layers] == in_turn(num_layers)) != wrong
    assert any(layers()) == wrong


def test_a_prompts_memory_is_freed_layer_by_layer_as_its_row_is_copied() -> None:
    model, enter, noted = model_of("llama"), Arena.enter, list[list[bool]]()
    lanes, cache = Lanes(model), prompt_of(model, 11)
    layers = held_layers(cache.slabs.by_layer)

    def noting(arena: Arena, before: int, own: int, offset: int, parts: Callable[[int], Sequence[Tensor]]):  # type: ignore[no-untyped-def]
        def asked(layer: int) -> Sequence[Tensor]:
            noted.append(layers())
            return parts(layer)

        return enter(arena, before, own, offset, asked)

    row = Row(model, list(range(3, 14)), GenerationOptions(max_new_tokens=NEW, ignore_eos=True), seed=0)
    with patch.object(Arena, "enter", noting):
        lanes.join([(0, 0)], [row], cache, [11], [0])
    assert noted == in_turn(len(layers()))
    assert not any(layers())


def test_replayed_rows_of_an_arena_that_moves_have_the_logits_of_each_alone() -> None:
    """It moves as a row joins, and back as it is trimmed."""
    model, ids, calls, replay = model_of("llama"), [5, 9, 6, 7, 8, 4, 10, 3, 11], list[int](), Program.__call__
    first, second = rows_alone(model, [11], ids)[0], rows_alone(model, [7], ids[3:6])[0]

    def noted(program: Program) -> Tensor:
        calls.append(len(program.result))
        return replay(program)

    lanes = Lanes(model)
    assert lanes._arena is not None
    with smallest(16), patch.object(Program, "__call__", noted):
        join(lanes, model, 0, 11)
        found = [step(lanes, ids[:3], 1)]
        join(lanes, model, 1, 7)
        assert lanes._arena.arena.num_slots == 64
        found.append(step(lanes, ids[3:6], 2))
        lanes.leave((1, 0), ids[5])
        lanes.trim(11 + 2 * NEW, 11 + 2 * NEW)
        assert lanes._arena.arena.num_slots == 32
        found.append(step(lanes, ids[6:], 1))
    assert not model.unrecordable
    assert calls == [1, 1, 2, 2, 1, 1, 1], "each is recorded, compared, replayed; what has moved is compared, replayed"
    apart = torch.cat([each[0] for each in found]) - first
    assert (found[1][1] - second).abs().max() <= TOLERANCE[torch.float32] * second.abs().max()
    assert apart.abs().max() <= TOLERANCE[torch.float32] * first.abs().max()


def test_an_idle_cpu_keeps_the_smallest_arena_and_the_step_of_one_row() -> None:
    model = model_of("llama")
    lanes = Lanes(model)
    steps = lanes._arena
    assert steps is not None
    with smallest(32):
        join(lanes, model, 0, 11)
        join(lanes, model, 1, 7)
        step(lanes, [5, 9, 6], 2)
        layers = held_layers(steps.arena.slabs.by_layer)
        for number in (0, 1):
            assert all(layers())
            lanes.leave((number, 0), 6)
        assert steps.arena.num_slots == 0 and not any(layers()), "a larger one is given back"

        for number in (0, 1):
            join(lanes, model, number, 4, num_new=NEW)
        step(lanes, [5, 9, 6], 2)
        lanes.leave((1, 0), 6)
        step(lanes, [7, 8, 4], 1)
        lanes.leave((0, 0), 4)
        assert steps.arena.num_slots == 32 and list(steps._steps) == [(1, 32)]
        join(lanes, model, 0, 11)
        with patch.object(model, "forward", side_effect=AssertionError("computed by the model")):
            found = step(lanes, [5, 9, 6], 1)
        known = rows_alone(model, [11], [5, 9, 6])
        assert (found - known).abs().max() <= TOLERANCE[torch.float32] * known.abs().max()

        model.unrecordable = "of a test"
        lanes.leave((0, 0), 6)
        assert steps.arena.num_slots == 0 and not steps._steps, "nothing is replayed any more"
