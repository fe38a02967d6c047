"""Tasks of the tests of snapshots that the last stage has stored and the first one begins from."""

from __future__ import annotations

from math import inf
from typing import Any
from unittest import mock

from torch import Tensor

from runahead import Engine, PrefillOptions, Ranks
from runahead.attention.states import StateLayer
from runahead.prefill import chain_run
from runahead.prefill.chain_run import ChainRun
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


def in_turn(
    ranks: Ranks, family: str, split: Split, prefill: PrefillOptions, snapshot_tokens: int, fault: str = ""
) -> Turns:
    """Generate from batches in turn, with states that are sent in a wrong way if `fault` says so."""

    def nothing(state: StateLayer, slots_1B1Z: Tensor) -> None:
        slots_1B1Z.zero_()

    def of_other_rows(state: StateLayer, slots_1B1Z: Tensor) -> None:
        write(state, slots_1B1Z)
        slots_1B1Z.copy_(slots_1B1Z.flip(1).clone())

    write = chain_run._write_state
    faults = {"": write, "nothing": nothing, "of other rows": of_other_rows}
    with mock.patch.object(chain_run, "_write_state", faults[fault]):
        return prefix_tasks.generate_in_turn(
            ranks, family, following(), OPTIONS, split, prefill, inf, None, snapshot_tokens
        )


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
