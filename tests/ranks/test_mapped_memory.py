"""Memory that ranks map: nothing is left of it, it is kept for the next prompts, and it may not be there."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runahead import GenerationOptions, PrefillOptions
from runahead.config import Carrier
from runahead.ranks.mapped.memory import FAR, Cell, HostMemory, MappedSegment, SharedBytes, Unmapped
from tests.families import oracle_tokens, prompt
from tests.rank_pool import RankPool
from tests.ranks import mapped_tasks, tasks


@pytest.fixture
def pool() -> Iterator[RankPool]:
    made = RankPool(2)
    yield made
    made.close()


def test_prompts_share_an_arena_and_a_longer_one_gets_a_new_one(pool: RankPool) -> None:
    """Lengths 20, 40, 40, 30 and 60: made for the first, the second and the last."""
    (first, _), (last, _) = pool.run(mapped_tasks.arenas, "llama", [20, 40, 40, 30, 60])
    assert first == [0] * 5  # the first rank receives nothing
    assert last == [1, 2, 2, 2, 3]


def test_no_descriptors_or_threads_pile_up(pool: RankPool) -> None:
    for _, counts in pool.run(mapped_tasks.arenas, "llama", [20, 40, 60, 80] + [30] * 4):
        assert counts[-1] <= counts[0] + 2  # of four arenas three were given back


def test_a_cache_that_is_still_in_use_is_not_written_to(pool: RankPool) -> None:
    assert pool.run(mapped_tasks.two_caches, "llama") == [True, True]


def test_killed_ranks_leave_no_shared_memory(pool: RankPool) -> None:
    before = set(os.listdir("/dev/shm"))
    options = GenerationOptions(max_new_tokens=2, ignore_eos=True)
    pool.run(tasks.generate, "llama", [prompt(40)], options, None, PrefillOptions(carrier=Carrier.copy))
    pids = [process.pid for process in pool.processes]
    assert any("memfd:runahead" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    for process in pool.processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("refused", ["SharedBytes", "Ranks._copying_between"])
def test_without_shared_memory_auto_takes_the_backend_and_copy_says_what_helps(pool: RankPool, refused: str) -> None:
    ids, options = prompt(40), GenerationOptions(max_new_tokens=4, ignore_eos=True)
    said = pool.run(mapped_tasks.without_memory, "llama", ids, options, refused)
    for rank, (tokens, warnings) in enumerate(said):
        assert tokens == oracle_tokens("llama", tuple(ids), 4)
        assert len(warnings) == (rank == 0)
    assert re.search("go over gloo, since ranks of one host cannot map .*no memory today", said[0][1][0])
    with pytest.raises(RuntimeError, match=r"prefill.carrier=copy, but .*no memory today.*use prefill.carrier=backend"):
        pool.run(tasks.generate, "llama", [ids], options, None, PrefillOptions(carrier=Carrier.copy))


def test_counters_wrap_around() -> None:
    memory = SharedBytes(MappedSegment.num_bytes(2))
    cell = MappedSegment(memory.memory, 2).cell("arrived", 1)
    cell.set(2**32 - 2)
    assert cell.reached(2**32 - 2) and cell.reached(2**32 - 3) and not cell.reached(2**32)
    cell.set(2**32 + 3)
    assert cell.value == 3
    assert cell.reached(2**32) and cell.reached(2**32 + 3) and not cell.reached(2**32 + 4)
    assert not cell.wait(2**32 + 4, 0.01)


def test_waits_end_when_a_job_is_over() -> None:
    memory = SharedBytes(MappedSegment.num_bytes(1))
    mapped = HostMemory(0, {0: MappedSegment(memory.memory, 1)}, [os.getpid()])
    mapped.release()
    cell: Cell = mapped.own.cell("arrived", 0)
    assert cell.reached(FAR // 2)


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(Unmapped, match="bytes of shared memory cannot be had"):
        SharedBytes(1 << 60)
