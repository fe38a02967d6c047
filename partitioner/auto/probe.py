"""The first guess of the cost: a few layers, timed on all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

from partitioner.cost.compute import layer_s
from partitioner.cost.fitted import POLYNOMIALS, FittedCost
from partitioner.cost.measured import MeasuredCost
from partitioner.cost.places import Places
from partitioner.measure import probe_compute
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks

SHORTEST_CHUNK, LONGEST_CHUNK = 16, 4096
"""Chunk lengths in tokens between which the longest one to time is chosen."""
LAYER_S = 0.04
"""Seconds of a layer from which on a chunk is long enough."""
REPEATS = 3
PROBE_LAYERS = 4
RANKS_ALIKE = 0.1
"""Log differences between ranks below which they are taken for noise: on most machines ranks are alike."""

LENT_ALIKE = 0.2
"""Share of what lent threads should gain that may be missing: less is taken for noise."""

MOST_POINTS = 39
"""Points that are timed at most: six for each length that is tried, nine of the chosen one, six with lent threads."""

Progress = Callable[[int, str], None]
"""Called before each point with the number of points, at most, and a text."""


def probe(
    model: Model,
    ranks: Ranks,
    on_progress: Progress = lambda total, text: None,
    *,
    places: Places | None = None,
    lent: float = 1.0,
) -> tuple[FittedCost, list[float], float]:
    """Time a few layers on all ranks at once, as they compute in a prompt. Every rank makes the same call.

    Args:
        places: of the whole model, if ranks have some of its layers.
        lent: factor by which the last stage has more threads while the others wait.

    Returns:
        the cost, whose constants are medians over the stages, the log slowness of each stage, and what of `lent` is
        gained, on every rank. Threads of a process wait for each other in each operation, so on a machine that does
        other work more of them may be slower.
    """

    def tick(text: str) -> None:
        on_progress(MOST_POINTS, text)
        ranks.progress()

    what = "the length of timed chunks"
    found = ranks.on_all_ranks(what, lambda: _longest_chunk(model, ranks, tick) if ranks.stage == 0 else 0)
    longest = ranks.broadcast(found, 0, what)
    chunks = sorted({max(1, longest // 16), max(1, longest // 4), longest})
    ranks.barrier("all ranks to time layers")
    measured = ranks.on_all_ranks("timed layers", lambda: _measured(model, chunks, REPEATS, tick, places))
    costs = ranks.gather(counted_cost(measured), "timed layers")
    # The ranks of a stage time the same layers in step, so the first stands for all of them.
    cost, slowness = combined([costs[rank] for rank in ranks.mesh.chain(0)], longest)
    if lent > 1:
        last, what = ranks.num_stages - 1, "layers timed with lent threads"

        def timed() -> FittedCost | None:
            if ranks.stage != last:
                return None
            with ranks.lending([last]):
                return counted_cost(_measured(model, chunks[-2:], REPEATS, tick, places))

        with_lent = ranks.gather(ranks.on_all_ranks(what, timed), what)
        first = ranks.mesh.rank(last, 0)
        own, more = costs[first], with_lent[first]
        assert more is not None, "the last stage has timed them"
        lent = gained(lent, layer_s(own, longest, longest) / layer_s(more, longest, longest))
    return cost, slowness, lent


def gained(lent: float, measured: float) -> float:
    """Gain of lent threads: as many times as there are more of them, unless clearly less was measured."""
    return lent if measured >= (1 - LENT_ALIKE) * lent else measured


def counted_cost(measured: MeasuredCost) -> FittedCost:
    """The cost whose attention is proportional to the attended pairs and all else linear in the tokens.

    So noise at one point changes constants a little, and never the shape: attention is scaled to its longest points.
    """
    c, (d, P) = max(measured.own_s), max(measured.prefix_s)
    steps = FittedCost.fit(measured)
    return replace(
        steps, own_s=(0.0, 0.0, measured.own_s[c] / c**2), prefix_s=(0.0, 0.0, 0.0, measured.prefix_s[d, P] / (d * P))
    )


def combined(costs: Sequence[FittedCost], num_tokens: int) -> tuple[FittedCost, list[float]]:
    """One cost for all ranks, of the medians of their constants, and the log slowness of each, around 0.

    Args:
        num_tokens: length of the chunk and of the prefix at which the ranks are compared.
    """
    constants = {
        name: tuple(median(values) for values in zip(*(getattr(cost, name) for cost in costs), strict=True))
        for name in POLYNOMIALS
    }
    logs = [math.log(layer_s(cost, num_tokens, num_tokens)) for cost in costs]
    middle = fmean(logs)
    slowness = [log - middle if max(logs) - min(logs) > RANKS_ALIKE else 0.0 for log in logs]
    return replace(costs[0], **constants), slowness  # type: ignore[arg-type]


def _longest_chunk(model: Model, ranks: Ranks, on_progress: Callable[[str], None]) -> int:
    """Length of a chunk whose layers take `LAYER_S`, as far as the model's positions allow.

    All ranks of a stage call this, and find the same.
    """
    limit = min(LONGEST_CHUNK, (model.max_positions or LONGEST_CHUNK + 1) - 1)
    chunk = max(2, min(SHORTEST_CHUNK, limit))
    while 4 * chunk <= limit:
        cost = _measured(model, [chunk // 2, chunk], 1, on_progress)
        if max(ranks.gather_in_stage(layer_s(cost, chunk, 0), "timed layers")) >= LAYER_S:
            break
        chunk *= 4
    return chunk


def _measured(
    model: Model,
    chunks: Sequence[int],
    repeats: int,
    on_progress: Callable[[str], None],
    places: Places | None = None,
) -> MeasuredCost:
    return probe_compute(
        model,
        chunks=chunks,
        prefixes=[chunks[0], chunks[-1]],
        repeats=repeats,
        places=places,
        probe_layers=PROBE_LAYERS,
        on_progress=on_progress,
    )
