"""The store of a job of one host: what it keeps, who gets in, and what jobs leave behind."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from runahead.ranks.heartbeat import Heartbeat
from runahead.ranks.meeting import local_store
from runahead.ranks.meeting.local_store import FolderFailure, LocalStore, is_on_one_host, make_private, meet_on_host
from runahead.ranks.meeting.presence import Presence
from tests.ranks.store_contract import require_like_torchs

TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(TORCHRUN, "TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path, Presence.here(0, {}), 30.0)


def jobs(temporary: Path) -> list[Path]:
    return sorted((temporary / f"runahead-{os.getuid()}").iterdir())


@pytest.mark.parametrize(
    ("environment", "is_one"),
    [
        (TORCHRUN, True),
        (TORCHRUN | {"MASTER_ADDR": "node7"}, True),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, False),
    ],
)
def test_the_launchers_variables_say_whether_a_job_is_on_one_host(environment: dict[str, str], is_one: bool) -> None:
    assert is_on_one_host(environment) is is_one


def test_it_does_what_torchs_own_stores_do(tmp_path: Path) -> None:
    """By torch's FileStore."""
    (tmp_path / "ours").mkdir()
    require_like_torchs(LocalStore(tmp_path / "ours", Presence.here(0, {}), 30.0))
    require_like_torchs(dist.FileStore(str(tmp_path / "theirs"), 1))


def test_a_value_that_comes_later_is_waited_for(store: LocalStore) -> None:
    late = threading.Timer(0.1, store.set, ("late", "now"))
    late.start()
    assert store.get("late") == b"now"
    late.join()


def test_many_who_add_at_once_each_get_a_number_of_their_own(store: LocalStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: store.add("n", 1), range(200)))
    assert sorted(numbers) == list(range(1, 201))


def test_of_many_who_set_a_first_value_all_get_the_same(store: LocalStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda number: store.compare_set("first", "", str(number)), range(50)))
    assert len(set(values)) == 1


def test_readers_never_see_half_a_value(store: LocalStore) -> None:
    values = [letter * 70_000 for letter in ("a", "b")]
    store.set("v", values[0])
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            for value in values:
                store.set("v", value)

    writer = threading.Thread(target=write)
    writer.start()
    seen = {store.get("v").decode() for _ in range(200)}
    is_over.set()
    writer.join()
    assert seen <= set(values)


def test_a_full_disk_does_not_silence_a_heartbeat(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set("beat", "100 100")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    store.set("beat", "101 9")
    assert store.get("beat") == b"101 9"
    with pytest.raises(FolderFailure, match=f"^{store.folder}: No space left on device; free some of its disk, or set"):
        store.set("new", "1")
    assert not list(store.folder.glob("part-*"))
    monkeypatch.setattr(Path, "open", full)  # nor is there room in the beat's own file
    with pytest.raises(FolderFailure, match="No space left"):
        store.set("beat", "102 9")


@contextmanager
def no_descriptor() -> Iterator[None]:
    """This process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_disk() -> Iterator[None]:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # it names no file

    opens = Path.open

    def writes_fail(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return (opens if mode[0] == "r" else full)(path, mode, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "NamedTemporaryFile", full)
        patch.setattr(tempfile, "mkdtemp", full)
        patch.setattr(Path, "open", writes_fail)
        yield


LACKS = {
    no_descriptor: "Too many open files; raise `ulimit -n`",
    no_disk: "No space left on device; free some of its disk, or set TMPDIR",
}


@pytest.fixture(params=LACKS)
def lack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    monkeypatch.setattr(local_store, "SCARCE_S", 0.1)
    return request.param  # type: ignore[no-any-return]


def test_what_lacks_is_told_with_the_folder_and_the_remedy(
    store: LocalStore, lack: Callable[[], AbstractContextManager[None]]
) -> None:
    with lack(), pytest.raises(FolderFailure, match=f"^{store.folder}: {LACKS[lack]}"):
        store.add("n", 1)
    assert store.add("n", 1) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_who_cannot_meet_says_where_and_why(
    temporary: Path, lack: Callable[[], AbstractContextManager[None]], rank: int
) -> None:
    if rank == 1:
        meet_on_host(0, TORCHRUN, 30.0)
    with lack(), pytest.raises(FolderFailure, match=f"^{temporary}/runahead-.*: {LACKS[lack]}"):
        meet_on_host(rank, TORCHRUN, 30.0)


def test_a_rank_that_lacks_room_or_descriptors_can_tell_one_failure(
    store: LocalStore, lack: Callable[[], AbstractContextManager[None]]
) -> None:
    with lack():
        assert store.compare_set("failure", "", "rank 1 failed: é") == "rank 1 failed: é".encode()
        with pytest.raises(FolderFailure, match=LACKS[lack]):
            store.compare_set("another", "", "1")
    assert store.get("failure") == "rank 1 failed: é".encode() and not store.check(["another"])
    assert store.compare_set("failure", "", "rank 0 failed") == "rank 1 failed: é".encode()


def test_a_first_failure_stays_where_there_is_no_room_for_a_second(
    store: LocalStore, lack: Callable[[], AbstractContextManager[None]]
) -> None:
    store.compare_set("failure", "", "rank 0 failed")
    with suppress(FolderFailure), lack():
        assert store.compare_set("failure", "", "rank 1 failed") == b"rank 0 failed"
    assert store.get("failure") == b"rank 0 failed"


def test_a_lack_of_descriptors_that_passes_is_not_noticed(store: LocalStore) -> None:
    with ExitStack() as lacking:
        lacking.enter_context(no_descriptor())
        later = threading.Timer(0.1, lacking.close)
        later.start()
        store.set("a", "1")
        later.join()
    assert store.get("a") == b"1"


def test_a_rank_that_can_open_no_file_names_that_as_the_cause(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: "the rendezvous store is lost, its launcher or host is gone", or that the peer has ended."""
    monkeypatch.setattr(local_store, "SCARCE_S", 0.1)
    heartbeats = [Heartbeat(store, rank, 2, computing=None) for rank in range(2)]
    beside = replace(Presence.here(0, {}), rank=1)
    with no_descriptor(), heartbeats[0].waiting():
        heartbeats[0].start([replace(beside, rank=0), beside])
        heartbeats[0]._thread.join(timeout=30.0)
        failure = heartbeats[0].failure
        heartbeats[0].announce_failure(f"rank 0 says: {failure}")
    assert failure is not None and failure.startswith(f"rank 0 cannot reach the others ({store.folder}: Too many open")
    assert heartbeats[1].announced() == f"rank 0 says: {failure}"
    for heartbeat in heartbeats:
        heartbeat.close()


def test_ranks_meet_in_a_folder_that_nobody_else_can_enter(temporary: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(meet_on_host, 1, TORCHRUN, 30.0)
        first = meet_on_host(0, TORCHRUN, 30.0)
        assert second.result().folder == first.folder
    for folder in (first.folder, first.folder.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    first.leave()
    assert first.folder.exists()
    second.result().leave()
    assert jobs(temporary) == []


@pytest.mark.parametrize("other", [{"MASTER_PORT": "29501"}, {"TORCHELASTIC_RESTART_COUNT": "1"}])
def test_other_jobs_meet_elsewhere(temporary: Path, other: dict[str, str]) -> None:
    meet_on_host(0, TORCHRUN, 30.0)
    with pytest.raises(
        dist.DistStoreError, match=r"rank 0 did not come to /.*/runahead-\d+ within 0 s; .* need the same"
    ):
        meet_on_host(1, TORCHRUN | other, 0.2)


@pytest.fixture
def ended() -> Presence:
    """A process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    presence = Presence.of_process(process.pid, 0)
    process.communicate()
    return presence


def test_a_killed_jobs_folder_is_not_taken_and_goes_when_the_next_job_begins(temporary: Path, ended: Presence) -> None:
    base = temporary / f"runahead-{os.getuid()}"
    make_private(base)
    store = meet_on_host(0, TORCHRUN, 30.0)
    (store.folder / "rank-0").unlink()
    local_store._enter(store.folder, ended)
    with pytest.raises(dist.DistStoreError, match="rank 0 did not come"):
        meet_on_host(1, TORCHRUN, 0.2)
    elsewhere = base / "elsewhere"
    elsewhere.mkdir()
    local_store._enter(elsewhere, replace(ended, machine="another container"))  # whose processes cannot be seen
    now = meet_on_host(0, TORCHRUN, 30.0)
    assert jobs(temporary) == sorted([elsewhere, now.folder])
    os.utime(elsewhere, (time.time() - 90_000,) * 2)  # no beat for more than a day
    later = meet_on_host(0, TORCHRUN, 30.0)
    assert jobs(temporary) == sorted([now.folder, later.folder])


def test_the_folder_of_a_job_that_still_ends_is_not_taken_a_second_time(temporary: Path) -> None:
    before = meet_on_host(0, TORCHRUN, 30.0)
    assert meet_on_host(1, TORCHRUN, 30.0).folder == before.folder
    now = meet_on_host(0, TORCHRUN, 30.0)
    assert meet_on_host(1, TORCHRUN, 30.0).folder == now.folder


@pytest.fixture(params=["others can enter", "a link", "a file"])
def foreign(request: pytest.FixtureRequest, temporary: Path) -> Iterator[str]:
    base = temporary / f"runahead-{os.getuid()}"
    if request.param == "a link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        base.symlink_to(temporary / "elsewhere")
    elif request.param == "a file":
        base.touch(mode=0o600)
    else:
        base.mkdir()
        base.chmod(0o750)
    yield str(base)


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_is_not_this_users_alone_is_refused(rank: int) -> None:
    with pytest.raises(dist.DistStoreError, match="not a folder of this user alone; remove it, or set TMPDIR"):
        meet_on_host(rank, TORCHRUN, 0.2)
