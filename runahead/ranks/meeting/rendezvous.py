"""Rendezvous of the ranks of a job: exchange process ids, compare library versions, and find who is stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache

import psutil
import torch.distributed as dist

from runahead.failures import RunFailure, SharedError
from runahead.place import JobPlace, slurm_place
from runahead.ranks.agreement import disagreement
from runahead.ranks.meeting.local_store import JOB, is_on_one_host, meet_on_host
from runahead.ranks.meeting.presence import Presence
from runahead.ranks.meeting.seal import Seal
from runahead.ranks.meeting.signed_store import SECRET, SECRET_FILE, SignedStore, job_secret

POLL_S = 0.05
"""Seconds between two looks at what is waited for."""

PROCESS_LOOK_S = 0.5
"""Seconds between two looks at the processes of this host."""


def environment_store(rank: int, size: int, patience_s: float) -> dist.Store:
    """The store of the job that the launcher's environment variables name: on one host files, else rank 0's host's.

    It stays until the process ends, since a later job of these processes may meet there again while another rank still
    leaves the one before. A job that is given another address or port meets in another store.

    Raises:
        DistError: the store cannot be made, or rank 0 makes none in time.
        ValueError: the job's secret cannot be used, or is not that of rank 0.
    """
    return _store_of(tuple(os.environ.get(name, "") for name in JOB), rank, size, patience_s)


@cache
def _store_of(_job: tuple[str, ...], rank: int, size: int, patience_s: float) -> dist.Store:
    if is_on_one_host(os.environ):
        return meet_on_host(rank, os.environ, patience_s)
    secret = job_secret(os.environ)
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=patience_s)))
    # Without a comparison ranks of different secrets would wait for each other in vain.
    which = "" if secret is None else Seal(secret).close(b"", "which secret").hex()
    store.set(f"runahead-secret-of-{rank}", which)
    if store.get("runahead-secret-of-0").decode() != which:
        raise ValueError(f"rank {rank} and rank 0 differ in {SECRET}, or {SECRET_FILE}; give all ranks the same")
    return store if secret is None else SignedStore(store, secret, patience_s)


def store_of_job(store: dist.Store, rank: int) -> dist.Store:
    """The part of a store that belongs to the job that this rank joins now: its first one, its second one, ..."""
    number = store.add(f"runahead-jobs-of-{rank}", 1)
    return dist.PrefixStore(f"runahead-job-{number}", store)


def meet(store: dist.Store, rank: int, size: int, facts: Mapping[str, str], *, patience_s: float) -> list[Presence]:
    """Wait until all ranks have started, and return their processes in order of rank.

    Args:
        facts: values by name that must be the same on all ranks.
        patience_s: seconds to wait for ranks that have not started.

    Raises:
        RunFailure: ranks did not start in time. The message names them.
        ValueError: on rank 0, if facts differ. The message names the ranks.
        SharedError: on the other ranks, if facts differ.
    """
    here = dist.PrefixStore("runahead-here", store)
    own = Presence.here(rank, facts)
    here.set(str(rank), json.dumps(asdict(own)))
    deadline = time.monotonic() + patience_s
    while missing := [peer for peer in range(size) if not here.check([str(peer)])]:
        if time.monotonic() > deadline:
            raise RunFailure(
                f"rank {', '.join(map(str, missing))} of {size} did not start within {patience_s:.0f} s; check its "
                "host and its messages"
            )
        time.sleep(POLL_S)
    ranks = [Presence(**json.loads(here.get(str(peer)))) for peer in range(size)]
    differing = disagreement([each.facts for each in ranks])
    if differing is not None:
        here.set(f"{rank} knows", "")
        while rank == 0 and time.monotonic() < deadline and not here.check([f"{peer} knows" for peer in range(size)]):
            time.sleep(POLL_S)  # the store may end with this process, so the others must have read it
        message = f"{differing}; install the same on every host"
        raise ValueError(message) if rank == 0 else SharedError(message, is_mistake=True)
    return ranks


class StoppedRanks:
    """Ranks of this host that are stopped (SIGSTOP) before they have come to the rendezvous.

    A rank may import libraries for long, and as it has no heartbeat yet, another one cannot tell whether it works. But
    a rank whose process is stopped will not come. The environment variables of a process tell its job.

    Args:
        timeout_s: seconds after which a stopped rank is given up.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._meeting_point = _meeting_point(dict(os.environ))
        self._stopped_s: dict[Presence, float] = {}
        self._looked_s = time.monotonic()

    def look(self) -> dict[Presence, float]:
        """Ranks that have been stopped for longer than the timeout, each with the seconds for which it was seen so."""
        elapsed_s = time.monotonic() - self._looked_s
        if elapsed_s >= PROCESS_LOOK_S:
            self._looked_s += elapsed_s
            # This process may have been stopped as well: what it has not seen does not count.
            found = {
                each: self._stopped_s.get(each, -PROCESS_LOOK_S) + min(elapsed_s, 2 * PROCESS_LOOK_S)
                for each in self._now()
            }
            self._stopped_s = found
        return {each: seconds for each, seconds in self._stopped_s.items() if seconds > self._timeout_s}

    def _now(self) -> list[Presence]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, RuntimeError, ValueError):  # ended, another user's, or no rank
                if process.status() == psutil.STATUS_STOPPED:
                    environment = process.environ()
                    if _meeting_point(environment) == self._meeting_point:
                        place = JobPlace.from_environment(_placed(environment))
                        found.append(Presence.of_process(process.pid, place.rank))
        return found


def _placed(environment: dict[str, str]) -> dict[str, str]:
    return environment | (slurm_place(environment) or {})


def _meeting_point(environment: dict[str, str]) -> tuple[str | None, ...]:
    placed = _placed(environment)
    return tuple(placed.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
