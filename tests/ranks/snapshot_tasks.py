"""Tasks of the tests of snapshots that the last stage has stored and the first one begins from."""

from __future__ import annotations

from contextlib import nullcontext
from math import inf
from typing import Any
from unittest import mock

from torch import Tensor

from runahead import Engine, PrefillOptions, Ranks
from runahead.attention.states import StateLayer
from runahead.prefill import chain_run
from runahead.prefill.base import Prefilled, PrefillJob
from runahead.prefill.chain_run import ChainRun
from runahead.prefill.kv_runahead import KVRunahead
from runahead.reuse.prefix_tree import PrefixTree
from tests.families import prompt, throughout
from tests.ranks import prefix_tasks
from tests.ranks.prefix_tasks import LAST, Split, Turns
from tests.ranks.tasks import tiny_model
from tests.ranks.test_stored_prefix import OPTIONS

DOCUMENT, OTHER = prompt(60, seed=5), prompt(40, seed=6)


def following() -> list[list[list[int]]]:
    """The document, the next turns of its prompt, two rows of which one would be padded, and a branch."""
    return [
        [DOCUMENT],
        [DOCUMENT + prompt(9, seed=1)],
        [DOCUMENT + prompt(7, seed=2), OTHER],
        [DOCUMENT + prompt(7, seed=3), OTHER + prompt(7, seed=4)],
        [DOCUMENT[:50] + prompt(9, seed=3)],
    ]


def branching() -> list[list[list[int]]]:
    """Two documents at once, texts that branch off inside them alone and padded, and padded ones that begin later."""
    return [
        [DOCUMENT + prompt(30, seed=7), OTHER + prompt(10, seed=8)],
        [[*DOCUMENT, *prompt(30, seed=7)][:70] + prompt(5, seed=1)],
        [DOCUMENT[:40] + prompt(20, seed=2), OTHER[:35] + prompt(3, seed=3)],
        [OTHER[:20] + prompt(30, seed=4), DOCUMENT + prompt(30, seed=7) + prompt(7, seed=5)],
        [prompt(33, seed=9), DOCUMENT[:50] + prompt(9, seed=6)],
    ]


def in_turn(
    ranks: Ranks,
    family: str,
    split: Split,
    prefill: PrefillOptions,
    snapshot_tokens: int,
    fault: str = "",
    *,
    branches: bool = False,
) -> Turns:
    """Generate from batches in turn, with states that are sent or kept in a wrong way if `fault` says so."""

    def nothing(state: StateLayer, slots_1B1Z: Tensor) -> None:
        slots_1B1Z.zero_()

    def of_other_rows(state: StateLayer, slots_1B1Z: Tensor) -> None:
        write(state, slots_1B1Z)
        slots_1B1Z.copy_(slots_1B1Z.flip(1).clone())

    def of_the_first_stop(self: ChainRun, number: int, stop: int) -> None:
        if not self.is_last and stop == min(each.stop for each in self._states.of(ranks.stage)):
            for each in self._states.of(ranks.stage):
                bytes_Z = self._state_bytes(self._state_at[number], each.token)[each.lane]
                self._layer(number).write_row(each.row, bytes_Z)

    def of_rows_as_they_are(self: StateLayer, *_: Any) -> None:
        pass

    write = chain_run._write_state
    faults: dict[str, Any] = {
        "nothing": mock.patch.object(chain_run, "_write_state", nothing),
        "of other rows": mock.patch.object(chain_run, "_write_state", of_other_rows),
        "of the first stop": mock.patch.object(ChainRun, "keep_state", of_the_first_stop),
        "of padding": mock.patch.object(StateLayer, "clear", of_rows_as_they_are),
    }
    with faults.get(fault, nullcontext()):
        batches = branching() if branches else following()
        return prefix_tasks.generate_in_turn(
            ranks, family, batches, OPTIONS, split, prefill, inf, None, snapshot_tokens
        )


def kept(ranks: Ranks, family: str, snapshot_tokens: int, limit: float) -> set[tuple[int, int]]:
    """Stops and rows whose states this rank has after a prefill of two rows, until the prompts are stored.

    Args:
        limit: of the tree, in states of a row.
    """
    model, found, run = tiny_model(family), list[set[tuple[int, int]]](), KVRunahead.run
    state_bytes = sum(shape.num_bytes for shape in model.state_shapes)
    tree = PrefixTree(limit * state_bytes, snapshot_tokens=snapshot_tokens)
    engine = Engine(model, ranks, decode=LAST, tree=tree)

    def noted(self: KVRunahead, job: PrefillJob) -> Prefilled:
        prefilled = run(self, job)
        found.append(set(prefilled.states))
        return prefilled

    with throughout(model.dtype), mock.patch.object(KVRunahead, "run", noted):
        engine.generate([prompt(40, seed=1), prompt(37, seed=2)], OPTIONS)
    return found[0]


def waits_for_the_device(ranks: Ranks, prefill: PrefillOptions) -> tuple[int, int]:
    """How often this rank's host waits for all work of its device in a prefill after a snapshot: where a layer asks for
    its state, and elsewhere."""
    found, inside = list[bool](), list[int]()
    await_device, load = Ranks.await_device, ChainRun.load_state

    def noted(self: Ranks, *args: Any) -> None:
        found.append(bool(inside))
        await_device(self, *args)

    def loading(self: ChainRun, number: int) -> None:
        inside.append(number)
        load(self, number)
        inside.clear()

    model = tiny_model("qwen3_next")
    engine = Engine(model, ranks, prefill=prefill, partition=Split(), decode=LAST, tree=PrefixTree(inf))
    with throughout(model.dtype):
        engine.generate([DOCUMENT], OPTIONS)
        with mock.patch.object(Ranks, "await_device", noted), mock.patch.object(ChainRun, "load_state", loading):
            engine.generate(following()[1], OPTIONS)
    return found.count(True), found.count(False)
