"""Present state of a server: its queue, its rows, prefills that run, and the last one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from runahead.engine import Engine
from runahead.serving.batch import Batch
from runahead.serving.items import Part, Progress
from runahead.serving.queue import RequestQueue
from runahead.serving.request import Request


@dataclass(frozen=True, kw_only=True)
class PrefillState:
    """A prefill that runs, or one that has ended, as it was then.

    Attributes:
        number: of the item.
        lengths: of its different prompts, in tokens.
        is_short: one stage computes it alone.
        elapsed_s: seconds since rank 0 told it to the ranks.
        predicted_s: of its prefill.
        progress: last report of each rank from inside the prefill.
        parts: reports of the ranks that have computed their parts.
    """

    number: int
    lengths: list[int]
    is_short: bool
    elapsed_s: float
    predicted_s: float
    progress: Mapping[int, Progress]
    parts: Mapping[int, Part]

    @classmethod
    def from_batch(cls, batch: Batch) -> PrefillState:
        """The state of a batch now."""
        return cls(
            number=batch.item.number,
            lengths=[batch.lengths[row] for row in batch.computed],
            is_short=batch.is_short,
            elapsed_s=time.monotonic() - batch.began_s,
            predicted_s=batch.predicted_s,
            progress=dict(batch.progress),
            parts=dict(batch.parts),
        )


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """Texts whose keys and values are stored for later prompts.

    Attributes:
        num_tokens: what several texts begin with counts once.
        num_bytes: of their memory, as the last stage reported with the last prompt.
        most_bytes: the limit of these now.
    """

    num_tokens: int
    num_bytes: int
    most_bytes: float


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """State of a server. It holds lengths and times, and nothing that a prompt or an answer says.

    Attributes:
        ranks: their names.
        device: where they compute, "cpu" or "cuda".
        prefill: name of the strategy.
        tells_layers: ranks report when they were in which layer.
        waiting: tokens of each request's different prompts, by deadline.
        rows: tokens of prompt and answer of each row that is decoded.
        num_tokens: tokens for which there is memory, of all rows that are computed or decoded.
        prefills: those that run.
        last: the last one that has ended whose timeline was recorded.
        parts: last report of each rank.
        stored: texts that are kept for later prompts; None if none are.
    """

    ranks: list[str]
    device: str
    prefill: str
    tells_layers: bool
    waiting: list[int]
    rows: list[tuple[int, int]]
    num_tokens: int
    prefills: list[PrefillState]
    last: PrefillState | None
    parts: Mapping[int, Part]
    stored: StoredState | None

    @classmethod
    def from_queue(
        cls, engine: Engine, queue: RequestQueue, last: PrefillState | None, parts: Mapping[int, Part]
    ) -> ServerState:
        """The state of a queue now."""
        batches, ranks, stored = queue.batches.values(), engine.ranks, None
        if engine.prefixes is not None:
            num_bytes = max((part.stored_bytes for part in parts.values()), default=0)
            stored = StoredState(
                num_tokens=queue.stored.num_tokens, num_bytes=num_bytes, most_bytes=queue.most_stored_bytes
            )
        return cls(
            ranks=[ranks.mesh.name(rank) for rank in range(ranks.size)],
            device=ranks.device.type,
            prefill=engine.prefill_options.name.name,
            tells_layers=not engine.may_shard,
            waiting=[sum(map(len, request.different)) for request in queue.by_deadline()],
            rows=[
                (batch.lengths[row], batch.new_tokens[row])
                for batch in batches
                if batch.is_decoded
                for row in sorted(batch.left)
            ],
            num_tokens=sum(batch.num_tokens for batch in batches),
            prefills=[PrefillState.from_batch(batch) for batch in batches if not batch.is_decoded],
            last=last,
            parts=dict(parts),
            stored=stored,
        )


def share_computed(queue: RequestQueue, request: Request, leader: int) -> float | None:
    """Share of the layers of a request's prompts that is computed; None if no rank has reported from inside them.

    Args:
        leader: the rank that gives the first token. In a chain it computes each layer last.
    """
    by_row = [batch for batch in queue.batches.values() for owner, _ in batch.owners if owner is request]
    reports = [batch.progress.get(leader) for batch in by_row]
    if all(each is None for each in reports):
        return None
    shares = [
        1.0 if batch.is_decoded else 0.0 if each is None else each.layers / each.of
        for batch, each in zip(by_row, reports, strict=True)
    ]
    return sum(shares) / len(shares)
