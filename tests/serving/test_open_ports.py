"""What somebody can do who reaches the ports of a server's ranks, and of their launcher."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from runahead.ranks.heartbeat import FAILURE
from tests.families import save_tiny_llama
from tests.serving.fakes import chat_tokenizer
from tests.serving.test_server import Job, options

ASKED = {"prompt": "the ice", "max_tokens": 9}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer())


def test_what_is_written_into_the_launchers_store_changes_nothing(model: str, tmp_path: Path) -> None:
    """torchrun keeps a store that takes what anybody writes, and tells its ranks to meet there.

    Where they do, the first line below ends the server, and its text comes to clients.
    """
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    server = Job(*options(model, f"serve.api_key_file={keys}"), environment={"TORCHELASTIC_USE_AGENT_STORE": "True"})
    try:
        launchers = dist.TCPStore(
            "127.0.0.1", server.store_port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        server.wait_until_ready()
        for job in range(1, 4):
            theirs = dist.PrefixStore("runahead", dist.PrefixStore(f"runahead-job-{job}", launchers))
            assert not theirs.check(["0"])  # where beats of rank 0 would be
            theirs.compare_set(FAILURE, "", "rank 1 failed: told by a stranger")
            theirs.set("0", "0 0")
        server.client.headers["authorization"] = "Bearer a-key-of-some-length"
        for _ in range(8):  # some beats long
            answer = server.post(ASKED)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 9
        assert [rank.status for rank in server.ranks] == [None, None]
        assert "stranger" not in "".join(rank.errors for rank in server.ranks)
    finally:
        server.kill()


def test_the_ranks_of_one_host_listen_where_no_other_host_can_connect(model: str) -> None:
    server = Job(*options(model))
    try:
        server.wait_until_ready()
        listening = [
            (connection.laddr.ip, connection.laddr.port)
            for rank in server.ranks
            for connection in psutil.Process(rank.pid).net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert ("127.0.0.1", server.port) in listening
        assert {address for address, _ in listening} <= {"127.0.0.1", "::1"}, listening
    finally:
        server.kill()


APART = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""What ranks are given that are each on a host of its own, as these are not."""


@pytest.mark.parametrize("has_secret", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_written_into_the_store_of_several_hosts_counts_with_the_jobs_secret_alone(
    model: str, has_secret: bool
) -> None:
    given = {"RUNAHEAD_SECRET": "what these two alone know"} if has_secret else {}
    server = Job(*options(model, "ranks.device=cpu"), environment=APART | given)
    try:
        server.wait_until_ready()
        assert ("have no secret" in server.ranks[0].errors) is not has_secret
        store = dist.TCPStore("127.0.0.1", server.store_port, is_master=False, timeout=timedelta(seconds=60))
        theirs = dist.PrefixStore("runahead", dist.PrefixStore("runahead-job-1", store))
        assert theirs.check(["0", "1"])  # the beats
        assert theirs.compare_set(FAILURE, "", "told by a stranger")
        if has_secret:
            for _ in range(8):
                assert server.post(ASKED).json()["usage"]["completion_tokens"] == 9
            assert [rank.status for rank in server.ranks] == [None, None]
        else:
            assert [rank.wait(60) for rank in server.ranks] == [1, 1]
            assert "told by a stranger" in server.ranks[0].errors
    finally:
        server.kill()
