"""Tasks of the scheduler's tests on live ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runahead import Engine, GenerationOptions
from runahead.ranks.ranks import Ranks
from runahead.serving.request import Request
from runahead.serving.scheduler import QueueLimits, Scheduler, follow
from tests.families import throughout
from tests.ranks.tasks import tiny_model
from tests.ranks.tensor_tasks import arranged, shared_model

FAMILY = "llama"


def cancel_rows(
    ranks: Ranks, num_shares: int, prompts: list[list[int]], options: list[GenerationOptions], cancel: dict[int, int]
) -> list[tuple[list[int], str]]:
    """New tokens and end of each row, of which rank 0 cancels some (row: step); then the same again without that."""
    steps = [0]

    def on_tokens(tokens: list[int | None]) -> list[int]:
        steps[0] += 1
        return [row for row, step in cancel.items() if step == steps[0]]

    with arranged(ranks, num_shares):
        if num_shares > 1:
            model = shared_model(ranks, FAMILY, torch.float64, num_shares)
        else:
            model = tiny_model(FAMILY)
        engine = Engine(model, ranks)
        with throughout(model.dtype):
            first = engine.generate(prompts, options, on_tokens=on_tokens, cancellable=True)
            second = engine.generate(prompts, options, cancellable=True)
    return [(each.new_token_ids, each.finish_reason) for each in [*first.generations, *second.generations]]


class Kept:
    """A listener that keeps what it hears."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.heard: list[str] = []

    def on_start(self) -> None:
        self.heard.append("start")

    def on_tokens(self, tokens: Sequence[int | None]) -> None:
        for row, token in zip(self.rows, tokens, strict=True):
            if token is not None:
                row.append(token)

    def on_end(self) -> None:
        self.heard.append("end")

    def on_failure(self, reason: str) -> None:
        self.heard.append(reason)


def serve(
    ranks: Ranks, prompts: list[list[int]], options: list[GenerationOptions], batch: int
) -> tuple[list[list[int]], list[list[str]], int]:
    """Tokens of a request per prompt, what their listeners heard, and the number of batches; on rank 0."""
    engine = Engine(tiny_model(FAMILY), ranks)
    with throughout(engine.model.dtype):
        if ranks.rank != 0:
            follow(engine, lambda: False)
            return [], [], 0
        scheduler = Scheduler(engine, QueueLimits(batch=batch, batch_wait_s=0.0))
        listeners = [Kept(1) for _ in prompts]
        for ids, each, listener in zip(prompts, options, listeners, strict=True):
            scheduler.submit(Request(prompts=[ids], options=[each], listener=listener))
        scheduler.drain()
        scheduler.run()
    return [each.rows[0] for each in listeners], [each.heard for each in listeners], engine._num_calls
