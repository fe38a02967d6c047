"""The store of a job of several hosts: what strangers write counts for nothing. And the seal of its messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from runahead.failures import RunFailure
from runahead.ranks.heartbeat import FAILURE, Heartbeat
from runahead.ranks.meeting import rendezvous
from runahead.ranks.meeting.rendezvous import environment_store
from runahead.ranks.meeting.seal import Seal, job_seal
from runahead.ranks.meeting.signed_store import SignedStore, job_secret
from tests.ranks.store_contract import require_like_torchs

SECRET = b"what only the ranks of this job know"


@pytest.fixture
def opened() -> dist.TCPStore:
    """A store as torchrun has one, to which anybody may connect."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.fixture
def store(opened: dist.TCPStore) -> SignedStore:
    return SignedStore(opened, SECRET, 0.2)


def test_it_does_what_torchs_own_stores_do(store: SignedStore) -> None:
    require_like_torchs(store)


def test_another_rank_reads_what_one_has_written(opened: dist.TCPStore, store: SignedStore) -> None:
    store.set("a", "1")
    assert SignedStore(dist.TCPStore("127.0.0.1", opened.port, is_master=False), SECRET, 5.0).get("a") == b"1"


def test_what_strangers_write_is_not_there(opened: dist.TCPStore, store: SignedStore) -> None:
    store.set("mine", "1")
    signed = opened.get("mine")
    forged = {
        "no signature": "rank 1 failed",
        "of another secret": Seal(b"another").close(b"rank 1 failed", "of another secret"),
        "of another key": signed,
        "changed": signed[:-1] + b"2",
        "short": signed[:20],
        "empty": "",
    }
    for key, value in forged.items():
        opened.set(key, value)  # type: ignore[arg-type]
        assert not store.check([key]), key
        with pytest.raises(RuntimeError):
            store.get(key)
    opened.set("mine", signed)  # type: ignore[arg-type]
    assert store.get("mine") == b"1"


def test_a_rank_can_announce_its_failure_where_a_stranger_was_before_it(
    opened: dist.TCPStore, store: SignedStore
) -> None:
    opened.set("a", "told by a stranger")
    assert store.compare_set("a", "", "rank 0 failed") == b"rank 0 failed"
    assert store.get("a") == b"rank 0 failed"


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_stranger_cannot_announce_a_failure(opened: dist.TCPStore, store: SignedStore, is_signed: bool) -> None:
    """Without signatures one can: the ranks of several hosts have none unless they are given a secret."""
    given = dist.PrefixStore("job", store if is_signed else opened)
    heartbeats = [Heartbeat(given, rank, 2, computing=None) for rank in range(2)]
    theirs = dist.PrefixStore("runahead", dist.PrefixStore("job", opened))
    assert theirs.check(["0"])
    theirs.compare_set(FAILURE, "", "told by a stranger")
    heartbeats[0]._look()
    assert heartbeats[0].failure == (None if is_signed else "told by a stranger")
    heartbeats[1].announce_failure("rank 1 failed")
    heartbeats[0]._look()
    assert heartbeats[0].failure == ("rank 1 failed" if is_signed else "told by a stranger")
    for heartbeat in heartbeats:
        heartbeat.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    return path


def test_a_secret_is_given_by_a_variable_or_a_file(file: Path) -> None:
    assert job_secret({}) is None
    assert job_secret({"RUNAHEAD_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    assert job_secret({"RUNAHEAD_SECRET_FILE": str(file)}) == b"0123456789abcdef"


def test_a_secret_that_is_none_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="RUNAHEAD_SECRET has 3 characters, of at least 16; use that of `openssl"):
        job_secret({"RUNAHEAD_SECRET": "abc"})
    with pytest.raises(ValueError, match=r"FILE=/none cannot be read \(No such file or directory\); name a file"):
        job_secret({"RUNAHEAD_SECRET_FILE": "/none"})
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"secret can be read or written by other users \(mode 640\); use chmod 600"):
        job_secret({"RUNAHEAD_SECRET_FILE": str(file)})
    file.chmod(0o600)
    file.write_bytes(b"\xff" * 16)
    with pytest.raises(ValueError, match=r"cannot be read \(it is no text\)"):
        job_secret({"RUNAHEAD_SECRET_FILE": str(file)})


def test_a_message_counts_in_its_own_place_alone() -> None:
    seal = Seal(SECRET)
    sealed = seal.close(b"work", "mail 1 from 0 to 1")
    assert seal.open(sealed, "mail 1 from 0 to 1") == b"work"
    strangers = [
        (Seal(b"another"), sealed, "mail 1 from 0 to 1"),
        (seal, sealed, "mail 2 from 0 to 1"),
        (seal, sealed + b"!", "mail 1 from 0 to 1"),
        (seal, seal.close(b"ork", "mail 1 from 0 to 1w"), "mail 1 from 0 to 1"),  # the same bytes, cut elsewhere
        (seal, b"", ""),
    ]
    for by, message, about in strangers:
        with pytest.raises(RunFailure, match="no rank of this job has sent"):
            by.open(message, about)


def seals_of_a_job(stores: Sequence[dist.Store], secrets: Sequence[bytes]) -> list[Seal]:
    with ThreadPoolExecutor(len(stores)) as pool:
        each = zip(stores, secrets, strict=True)
        made = [pool.submit(job_seal, store, rank, len(stores), secret) for rank, (store, secret) in enumerate(each)]
        return [one.result() for one in made]


def test_ranks_have_one_seal_which_no_other_job_with_their_secret_has(opened: dist.TCPStore) -> None:
    stores = [SignedStore(dist.PrefixStore(job, opened), SECRET, 5.0) for job in ("first", "second", "third")]
    first, second = (seals_of_a_job([store] * 3, [SECRET] * 3) for store in stores[:2])
    sealed = first[0].close(b"work", "mail 1 from 0 to 1")
    assert [seal.opened(sealed, "mail 1 from 0 to 1") for seal in first] == [b"work"] * 3
    assert [seal.opened(sealed, "mail 1 from 0 to 1") for seal in second] == [None] * 3
    differing = seals_of_a_job([stores[2]] * 2, [SECRET, b"another"])
    assert differing[1].opened(differing[0].close(b"work", "mail"), "mail") is None


def test_what_an_earlier_job_has_written_gives_no_rank_its_seal(opened: dist.TCPStore) -> None:
    """A stranger has copied the whole store of a job of the same secret, and answers for rank 1 before it does."""
    before, now = dist.PrefixStore("before", opened), dist.PrefixStore("now", opened)
    earlier = seals_of_a_job([SignedStore(before, SECRET, 5.0)] * 2, [SECRET] * 2)
    for rank in range(2):
        now.set(f"nonce of {rank}", before.get(f"nonce of {rank}"))  # type: ignore[arg-type]
    seal = job_seal(SignedStore(now, SECRET, 5.0), 0, 2, SECRET)
    assert seal.opened(earlier[1].close(b"work", "mail 1 from 1 to 0"), "mail 1 from 1 to 0") is None


@pytest.mark.parametrize("secrets", [[SECRET, SECRET], [SECRET, b"another secret of another job"], [SECRET, None]])
def test_ranks_of_different_secrets_do_not_meet(
    opened: dist.TCPStore, secrets: list[bytes | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(zip(("rank_0", "rank_1"), secrets, strict=True))
    monkeypatch.setattr(rendezvous, "job_secret", lambda _: given[threading.current_thread().name.rpartition("_")[0]])
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(opened.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }.items():
        monkeypatch.setenv(name, value)

    def come(rank: int) -> dist.Store | Exception:
        try:
            return environment_store(rank, 2, 30.0)
        except Exception as error:
            return error

    with ExitStack() as pools:
        threads = [pools.enter_context(ThreadPoolExecutor(1, f"rank_{rank}")) for rank in range(2)]
        first, second = [thread.submit(come, rank) for rank, thread in enumerate(threads)]
        assert isinstance(first.result(), SignedStore)
        if secrets[0] == secrets[1]:
            assert isinstance(second.result(), SignedStore)
        else:
            assert str(second.result()).startswith("rank 1 and rank 0 differ in RUNAHEAD_SECRET, or")
