"""The part of all ranks but rank 0 in a server: they carry out the work items that it tells."""

from __future__ import annotations

from collections.abc import Callable

from runahead.engine import Engine
from runahead.reuse.handover import HandoverFolder
from runahead.serving.executor import Executor
from runahead.serving.items import Inbox
from runahead.serving.limits import QueueLimits
from runahead.serving.mail.mail import Mail
from runahead.serving.room import Room


def follow(
    engine: Engine,
    limits: QueueLimits,
    asked_to_end: Callable[[], bool] = lambda: False,
    *,
    clock_offset_s: float = 0.0,
    room: Room | None = None,
    handover: HandoverFolder | None = None,
) -> None:
    """Carry out the work items of rank 0 on another rank, until the last.

    Args:
        limits: as on rank 0.
        asked_to_end: whether this process was asked to end, which rank 0 learns when it looks.
        clock_offset_s: seconds to add to this rank's `time.perf_counter` to get rank 0's.
        room: as on rank 0.
        handover: as of `Executor`.
    """
    ranks, inbox = engine.ranks, Inbox()
    with ranks.announcing_failure(), ranks.watching("the next work item", [0]):
        mail = Mail(ranks, inbox.put, inbox.fail)
        executor = Executor(
            engine, inbox, mail.post, limits, asked_to_end, clock_offset_s, room=room, handover=handover
        )
        executor.run(lambda ready: ranks.wait_until(ready, "the next work item", [0]))
        mail.close()
