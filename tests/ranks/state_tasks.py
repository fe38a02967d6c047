"""Tasks of ranks about the states of hybrid models."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import nn

from runahead import ContextPartition, Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.attention.states import StateLayer
from runahead.prefill.chain_run import ChainRun
from runahead.prefill.stage_run import StageRun
from runahead.report import RankReport
from tests.families import throughout
from tests.ranks import tasks


def bytes_of(ranks: Ranks, family: str) -> tuple[int, int]:
    """Bytes of a token's keys and values, and of the states of a row."""
    model = tasks.tiny_model(family)
    kv = sum(shape.bytes_per_token() for shape in model.kv_shapes)
    return kv, sum(shape.num_bytes for shape in model.state_shapes)


def prefill_without(ranks: Ranks, lost: str, *args: Any) -> tasks.PrefillOutcome:
    """A prefill in which one kind of state does not arrive."""
    read = StateLayer.read

    def incomplete(self: StateLayer, *given: Any) -> None:
        read(self, *given)
        for name, _, state in self.tensors():
            if name == lost:
                state.zero_()

    with mock.patch.object(StateLayer, "read", incomplete):
        return tasks.prefill(ranks, *args)


def named_layers(
    ranks: Ranks, family: str, ids: list[int], boundaries: tuple[int, ...], prefill: PrefillOptions
) -> tuple[list[int], dict[int, str], list[str], list[str]]:
    """Numbers of this rank's layers in a timeline, in order; what it sends by layer; kinds and layers of its messages
    in their records; and those that it says it waits for."""
    waited, partition = list[str](), ContextPartition(boundaries=boundaries)
    wait_until = Ranks.wait_until

    def noted(self: Ranks, ready: Any, what: str, *more: Any) -> None:
        waited.append(what)
        wait_until(self, ready, what, *more)

    before = ranks.records.all()
    engine = Engine(tasks.tiny_model(family), ranks, prefill=prefill, partition=lambda *_: partition)
    options = GenerationOptions(max_new_tokens=1)
    with throughout(engine.model.dtype), mock.patch.object(Ranks, "wait_until", noted):
        spans = engine.generate([ids], options, record_timeline=True).spans[ranks.rank]
    computed = [span.layer for span in sorted(spans, key=lambda span: span.start_s) if span.kind == "compute"]
    layers = list(dict.fromkeys(layer for layer in computed if layer is not None))
    sent = {span.layer: span.detail for span in spans if span.kind == "send" and span.layer is not None}
    records = [f"{each.kind} {each.layer}" for each in ranks.records.all() if all(each is not one for one in before)]
    named = [found[1] for what in waited if (found := re.search(r"the (\w+ of layer \d+)", what))]
    return layers, sent, sorted(set(records)), named


def computed_before_states(
    ranks: Ranks, family: str, ids: list[int], boundaries: tuple[int, ...], reads_late: bool | None = None
) -> list[list[str]]:
    """Projections of each layer with a state that this rank has computed before it waits for the state.

    Args:
        reads_late: in place of what was found when the model was loaded.
    """
    model, computed, found = (
        tasks.tiny_model(family, torch.float64),
        list[str](),
        list[list[str]](),
    )  # that of `prefill`
    held = model.held
    assert held is not None
    layers, load = list(held.state_of), ChainRun.load_state

    def noted(self: ChainRun, number: int) -> None:
        inside = f"layers.{layers[number]}."
        found.append([name.rpartition(".")[2] for name in computed if inside in name])
        load(self, number)

    def note(name: str) -> Any:
        return lambda *_: computed.append(name)

    linear = {name: child for name, child in model.module.named_modules() if isinstance(child, nn.Linear)}
    hooks = [child.register_forward_hook(note(name)) for name, child in linear.items()]
    late = held if reads_late is None else replace(held, reads_late=reads_late)
    try:
        with mock.patch.object(ChainRun, "load_state", noted), mock.patch.object(model, "held", late):
            tasks.prefill(ranks, family, [ids], boundaries, PrefillOptions())
    finally:
        for hook in hooks:
            hook.remove()
    return found


def waits_before_padding(ranks: Ranks, prompts: list[list[int]], boundaries: tuple[int, ...]) -> list[str]:
    """What this rank waits for, of its device and of states, in a prefill of these prompts, in order."""
    waited = list[str]()
    await_device, load = Ranks.await_device, ChainRun.load_state

    def noted(self: Ranks, *args: Any) -> None:
        waited.append("device")
        await_device(self, *args)

    def loading(self: ChainRun, number: int) -> None:
        waited.append("state")
        load(self, number)

    with mock.patch.object(Ranks, "await_device", noted), mock.patch.object(ChainRun, "load_state", loading):
        tasks.prefill(ranks, "qwen3_next", prompts, boundaries, PrefillOptions())
    return waited


def bytes_in_layers(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    boundaries: tuple[int, ...],
    prefill: PrefillOptions | None = None,
) -> tuple[int, int, RankReport]:
    """Most bytes of slabs and of states that are alive on this rank in a prefill, with its report.

    Looked at from outside, before and after each layer: what memory the slabs and states have that were made.
    """
    layers, found = WeakSet[StateLayer](), [(0, 0)]
    make = StateLayer.__init__

    def noted_layer(self: StateLayer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        layers.add(self)

    def looking(owner: type[StageRun], name: str) -> Any:
        verb = getattr(owner, name)

        def looked(self: StageRun, *args: Any) -> None:
            verb(self, *args)
            storages = [state.untyped_storage() for layer in layers for *_, state in layer.tensors()]
            of_states = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
            found.append((slab_bytes() + of_states, of_states))

        return mock.patch.object(owner, name, looked)

    gc.collect()
    partition = ContextPartition(boundaries=boundaries)
    engine = Engine(tasks.tiny_model(family), ranks, prefill=prefill, partition=lambda *_: partition)
    with (
        tasks.slots_noted() as slab_bytes,
        mock.patch.object(StateLayer, "__init__", noted_layer),
        looking(ChainRun, "load_state"),
        looking(ChainRun, "before_save"),
        looking(ChainRun, "attended"),
        looking(StageRun, "_after_layer"),
        throughout(engine.model.dtype),
    ):
        report = engine.generate(prompts, options).ranks[ranks.rank]
    return max(most for most, _ in found), max(states for _, states in found), report
