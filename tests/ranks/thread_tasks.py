"""Tasks of ranks in test_threads.py: top-level functions, since they run in other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from runahead import ContextPartition, DecodeOptions, Engine, GenerationOptions, Ranks
from runahead import engine as engines
from runahead.config import DecodeName
from runahead.decoding import placement
from runahead.decoding.rows import Rows
from runahead.prefill.reusing import ReusingPrefill
from runahead.ranks.devices import RankThreads
from tests.families import prompt, throughout
from tests.ranks.tasks import tiny_model

GREEDY = GenerationOptions(max_new_tokens=4, ignore_eos=True)
THREADS = 4
"""Threads of each rank, as the tests say, on more processors than there are threads."""


@contextmanager
def noted(ranks: Ranks) -> Iterator[list[Any]]:
    """The events on this rank: numbers of threads that are set (and are not), prefills and decodings."""
    events = list[Any]()

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return call(*args, **kwargs)

        return noting

    def note(number: int) -> None:
        if threading.current_thread() is threading.main_thread():  # a thread of collectives sets it, too
            events.append(number)

    beside = {rank: RankThreads(number=THREADS, processors=64) for rank in range(ranks.size)}
    with (
        mock.patch.object(ranks, "threads", beside),
        mock.patch.object(torch, "set_num_threads", note),
        mock.patch.object(torch, "get_num_threads", lambda: THREADS),
        mock.patch.object(ReusingPrefill, "run", around("prefill", ReusingPrefill.run)),
        mock.patch.object(engines, "decode_batch", around("decode", engines.decode_batch)),
    ):
        yield events


def threads_set(
    ranks: Ranks, boundaries: tuple[int, ...], decode: DecodeName, lends: bool = True
) -> tuple[list[Any], list[int]]:
    """The events on a rank in one call of the engine, and the new tokens."""
    model = tiny_model("llama")
    with throughout(model.dtype), noted(ranks) as events:
        engine = Engine(
            model,
            ranks,
            partition=lambda *_: ContextPartition(boundaries=boundaries),
            decode=DecodeOptions(name=decode),
            lends=lends,
        )
        batch = engine.generate([prompt(boundaries[-1])], GREEDY)
    return events, batch.generations[0].new_token_ids


def threads_of_memory(ranks: Ranks, boundaries: tuple[int, ...], decode: DecodeName) -> int:
    """Number of threads that the predicted peak of this rank counts."""
    model = tiny_model("llama")
    with noted(ranks), throughout(model.dtype), mock.patch.object(model, "memory_after") as memory_after:
        engine = Engine(
            model,
            ranks,
            partition=lambda *_: ContextPartition(boundaries=boundaries),
            decode=DecodeOptions(name=decode),
        )
        memory_after.return_value = None
        engine.generate([prompt(boundaries[-1])], GREEDY)
    return int(memory_after.call_args.kwargs["num_threads"])


def threads_while_timed(ranks: Ranks, lends: bool = True) -> list[Any]:
    """The events on a rank where decode=auto times steps both ways before a prompt."""
    model = tiny_model("llama")
    timed = placement.Placement._times
    with (
        throughout(model.dtype),
        noted(ranks) as events,
        mock.patch.object(placement, "LEAST_BYTES", 100),
        mock.patch.object(placement, "LEAST_SHARE", 0.0),
    ):

        def times(self: Any, forward: Any, batch: int, gather: Any = None) -> list[float]:
            events.append("last" if gather is None else "sharded")
            timed(self, forward, batch, gather)
            return [1.0 if gather is None else 2.0]

        with mock.patch.object(placement.Placement, "_times", times):
            Engine(model, ranks, lends=lends).generate([prompt(60)], GREEDY)
    return events


def fail_while_lent(ranks: Ranks, failing: int) -> tuple[list[Any], str]:
    """Fail on one of two ranks while the last one decodes. What happened on this rank, and the error that it raises."""
    model, error = tiny_model("llama"), ""

    def fail(*_: Any) -> None:
        raise ValueError("out of luck")

    step = fail if failing == 1 else Rows.step
    with noted(ranks) as events, throughout(model.dtype), mock.patch.object(Rows, "step", step):
        engine = Engine(model, ranks)
        try:
            engine.generate([prompt(20)], GREEDY, on_tokens=fail if failing == 0 else None)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return events, error


def threads_in_steps(ranks: Ranks) -> list[int]:
    """Numbers of threads, as they really are, in the forwards of a prompt and of its answer."""
    model, found = tiny_model("llama"), list[int]()
    forward = type(model).forward

    def seen(*args: Any, **kwargs: Any) -> Any:
        found.append(torch.get_num_threads())
        return forward(*args, **kwargs)

    beside = {rank: RankThreads(number=1, processors=64) for rank in range(ranks.size)}
    with (
        throughout(model.dtype),
        mock.patch.object(ranks, "threads", beside),
        mock.patch.object(type(model), "forward", seen),
    ):
        Engine(model, ranks, decode=DecodeOptions(name=DecodeName.last)).generate([prompt(30)], GREEDY)
    return [*found, torch.get_num_threads()]
