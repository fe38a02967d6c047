"""No host waits for its GPU behind another rank's message, but where that rank is watched.

A rank that is stopped would else never be found, and this rank would count as silent.
"""

from __future__ import annotations

import pytest
from torch import Tensor

from runahead.config import Transfer
from runahead.kv_transfer import CopyTransfer
from runahead.kv_transfer.nccl import NcclTransfer
from runahead.timeline import clock
from runahead.timeline.clock import CudaClock
from tests.virtual import device
from tests.virtual.device import Job, Unwatched, copies_late, transfers_late
from tests.virtual.jobs import chain
from tests.virtual.machine import Budget
from tests.virtual.mapped import VirtualMemory


class AsksBehindAMessage(NcclTransfer):
    """Asks the GPU for a value in each layer, as some policies do."""

    def close(self, layer: int) -> None:
        self._gpu.current_stream().synchronize()
        super().close(layer)


def test_a_wait_behind_a_message_is_found() -> None:
    Job(1).run(chain(1, Transfer.relay, carrier=AsksBehindAMessage))
    with pytest.raises(Unwatched, match="rank 1, stream"):
        Job(2, choose=transfers_late).run(chain(2, Transfer.relay, carrier=AsksBehindAMessage))


class TakesTheTime(NcclTransfer):
    """Between two layers it takes the time of something else, as a server does for a short prompt inside a long one."""

    def open(self, layer: int) -> None:
        super().open(layer)
        with self._gpu.on(self._gpu.stream("another prompt")):  # which waits for no message
            other = CudaClock(self._gpu)
            assert other.seconds(other.mark()) > 0


@pytest.mark.parametrize("transfer", list(Transfer))
def test_a_clock_waits_for_no_message(transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "Event", device.Event)
    # Without queues that streams share, as in test_copies.py.
    Job(3, choose=transfers_late, budget=Budget(queues=64)).run(chain(3, transfer, carrier=TakesTheTime))


@pytest.mark.parametrize("transfer", list(Transfer))
def test_memory_of_shorter_prompts_is_unmapped_behind_no_message(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmapped: list[int] = []
    close = VirtualMemory._close

    def noted(memory: VirtualMemory, opened: Tensor) -> None:
        close(memory, opened)
        unmapped.append(memory.rank)

    monkeypatch.setattr(VirtualMemory, "_close", noted)
    body = chain(3, transfer, num_layers=6, carrier=CopyTransfer, prompts=4, grows=True)
    Job(3, choose=copies_late, hosts=[0] * 3, budget=Budget(queues=64)).run(body)
    assert 1 in unmapped  # which sends to the last rank, whose memory is free after each prompt
