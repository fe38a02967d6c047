"""The scheduler's side, with a server that is late, busy, wrong or gone: it answers at once, and never for ever."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runahead_vllm.asking import Asking, Source
from runahead_vllm.prompt_file import file_name
from runahead_vllm.scheduling import Load, Report, SchedulerSide
from runahead_vllm.server import Call, Server, ServerError
from tests.connector.fake_server import Answer, FakeServer, serving
from tests.connector.request import request
from tests.connector.written import KEY, SALT, numbers, write

IDS = list(range(20))
BLOCKS = ([1, 2, 3],)


class Side:
    """A scheduler's side with its server and folder."""

    def __init__(self, folder: Path, server: FakeServer, **more: Any) -> None:
        self.folder, self.server = folder, server
        given: dict[str, Any] = {"wait_s": 20.0, "at_once": 2, "min_tokens": 8, "look_only": False} | more
        source = Source(
            server=Server(server.url, given.get("key", "")), folder=folder, key=KEY, salt=SALT, num_layers=3
        )
        asking = Asking(source, at_once=given["at_once"], wait_s=given["wait_s"])
        self.side = SchedulerSide(asking, min_tokens=given["min_tokens"], look_only=given["look_only"])

    def settled(self, asked: Any, num_computed: int = 0) -> tuple[int | None, bool]:
        """Its answer once it is not "ask me later"."""
        end = time.monotonic() + 20
        while (answer := self.side.matched(asked, num_computed))[0] is None:
            assert answer == (None, False) and time.monotonic() < end
            time.sleep(0.002)
        return answer

    def load(self, asked: Any, num_external: int) -> Load:
        self.side.allocated(asked, BLOCKS, num_external)
        [load] = self.side.take_loads()
        assert not self.side.take_loads()
        return load


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Side]:
    """One whose server writes each prompt."""

    def prefill(ids: list[int], closed: Callable[[float], bool]) -> Answer:
        return 200, {"file": write(tmp_path, ids, numbers(ids)).name}

    with serving(FakeServer({}, prefill)) as server:
        yield Side(tmp_path, server)


def test_all_but_the_last_token_is_promised_once_the_file_is_there(made: Side, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="vllm.runahead")
    asked = request("a", IDS)
    assert made.settled(asked) == (19, True)
    assert made.side.matched(asked, 4) == (15, True), "vLLM has four tokens by now"
    load = made.load(asked, 15)
    assert (load.start, load.stop, load.block_ids) == (4, 19, BLOCKS)
    made.side.reported({"a": [Report(960, 0.5)]})
    made.side.received({"a"}, ())
    made.side.allocated(asked, BLOCKS, 0)  # vLLM's second call
    made.side.ended("a")
    assert made.server.asked == [IDS] and not made.side.take_loads()
    [line] = [record.message for record in caplog.records]
    assert "asked for 20 tokens, waited" in line and "loaded 15 (0.0 MB in 0.50 s)" in line
    assert [(each.kind, each.num_tokens, each.num_bytes) for each in made.side.happened] == [("loaded", 15, 960)]


def test_the_question_may_come_in_every_step(made: Side) -> None:
    """Also after the promise, as long as no block is free."""
    asked = request("a", IDS)
    made.settled(asked)
    assert {made.side.matched(asked, 0) for _ in range(50)} == {(19, True)}
    assert made.server.asked == [IDS]


def test_a_preempted_request_is_loaded_again(made: Side) -> None:
    asked = request("a", IDS)
    for _ in range(2):
        assert made.settled(asked) == (19, True)
        made.load(asked, 19)
        made.side.reported({"a": [Report(1, 0.1)]})
        made.side.received({"a"}, ())
    assert made.server.asked == [IDS]


def test_a_failure_is_remembered(made: Side, caplog: Any) -> None:
    """vLLM asks again at once: the same promise would go round for ever."""
    asked = request("a", IDS)
    made.settled(asked)
    made.load(asked, 19)
    made.side.reported({"a": [Report(0, 0.1, "the checksum of layer 1 differs")]})
    made.side.received({"a"}, {"a"})
    assert {made.side.matched(asked, 0) for _ in range(20)} == {(0, False)}
    [line] = [record.message for record in caplog.records]
    assert "given up: its file is not usable: the checksum of layer 1 differs; vLLM computes it" in line


def test_one_rank_that_fails_is_enough(made: Side) -> None:
    asked = request("a", IDS)
    made.settled(asked)
    made.load(asked, 19)
    made.side.reported({"a": [Report(960, 0.1)]})
    made.side.received((), ())  # the other rank still reads
    made.side.reported({"a": [Report(0, 0.1, "it is gone")]})
    made.side.received({"a"}, {"a"})
    assert made.side.matched(asked, 0) == (0, False)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((429, {"error": {"message": "the queue\nis full"}}), "it answered 429: the queue is full"),
        ((503, {"error": {"message": "a rank is lost"}}), "it answered 503: a rank is lost"),
        ((507, {"error": {"message": "no room"}}), "it answered 507: no room"),
        ((404, b"<html>"), "it answered 404"),
        ((0, None), "RemoteDisconnected"),
        ((200, b"{"), "its answer is no JSON object"),
        ((200, b"[" * 100_000), "its answer is no JSON object"),
        ((200, [1]), "its answer is no JSON object"),
        ((200, {}), "'None' is not that of these 20 tokens"),
        ((200, {"file": "../../etc/passwd"}), "'../../etc/passwd' is not that of these 20 tokens"),
        ((200, {"file": "0" * 64 + ".safetensors"}), "is not that of these 20 tokens"),
        ((200, {"file": file_name(KEY, SALT, IDS)}), "its file is not in"),
    ],
)
def test_whatever_the_server_says_vllm_computes_at_once(
    tmp_path: Path, answer: Answer, words: str, caplog: Any
) -> None:
    with serving(FakeServer({}, lambda ids, closed: answer)) as server:
        made = Side(tmp_path, server)
        asked = request("a", IDS)
        assert made.settled(asked) == (0, False)
        assert {made.side.matched(asked, 0) for _ in range(5)} == {(0, False)}
        made.side.allocated(asked, BLOCKS, 0)
        made.side.ended("a")
    [line] = [record.message for record in caplog.records]
    assert words in line and len(made.server.asked) == 1
    assert [each.kind for each in made.side.happened] == ["given_up"]


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    with serving(FakeServer({}, lambda ids, closed: (0, None))) as server:
        made = Side(tmp_path, server)
    assert made.settled(request("a", IDS)) == (0, False)


@pytest.mark.parametrize("damage", ["cut off", "other model", "shorter prompt", "other prompt"])
def test_a_damaged_or_foreign_file_is_not_promised(tmp_path: Path, damage: str) -> None:
    def prefill(ids: list[int], closed: Callable[[float], bool]) -> Answer:
        if damage == "shorter prompt":
            path = write(tmp_path, ids[:-1], numbers(ids[:-1]))
        elif damage == "other prompt":
            path = write(tmp_path, [ids[0] + 1, *ids[1:]], numbers(ids))
        else:
            path = write(tmp_path, ids, numbers(ids), model="another" if damage == "other model" else KEY)
        if damage == "cut off":
            path.write_bytes(path.read_bytes()[:-3])
        return 200, {"file": path.name}

    with serving(FakeServer({}, prefill)) as server:
        assert Side(tmp_path, server).settled(request("a", IDS)) == (0, False)


def hanging(ids: list[int], closed: Callable[[float], bool]) -> Answer:
    closed(20)
    return 0, None


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_late_prompt_is_computed_by_vllm_and_the_server_told(tmp_path: Path, caplog: Any) -> None:
    with serving(FakeServer({}, hanging)) as server:
        made, asked = Side(tmp_path, server), request("a", IDS)
        assert made.side.matched(asked, 0) == (None, False)
        until(lambda: server.asked == [IDS])
        made.side._asked["a"].began_s -= 20
        assert made.side.matched(asked, 0) == (0, False)
        until(lambda: server.cancelled == [IDS])
    assert "within 20 s" in caplog.text


def test_a_request_that_waits_for_a_thread_is_late_as_well(tmp_path: Path) -> None:
    with serving(FakeServer({}, hanging)) as server:
        made = Side(tmp_path, server, at_once=1)
        asked = [request(str(number), [number, *IDS]) for number in range(3)]
        assert [made.side.matched(each, 0) for each in asked] == [(None, False)] * 3
        for waiting in made.side._asked.values():
            waiting.began_s -= 20
        assert [made.side.matched(each, 0) for each in asked] == [(0, False)] * 3


def test_an_aborted_request_is_cancelled_at_the_server(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="vllm.runahead")
    with serving(FakeServer({}, hanging)) as server:
        made = Side(tmp_path, server)
        assert made.side.matched(request("a", IDS), 0) == (None, False)
        until(lambda: server.asked == [IDS])
        made.side.ended("a")
        until(lambda: server.cancelled == [IDS])
    assert [each.kind for each in made.side.happened] == ["dropped"]
    [line] = [record for record in caplog.records]
    assert line.levelno == logging.INFO and line.message.endswith("dropped: the request ended")


def test_a_load_of_a_request_that_was_aborted_is_forgotten_when_it_ends(made: Side) -> None:
    asked = request("a", IDS)
    made.settled(asked)
    made.load(asked, 19)
    made.side.ended("a")
    made.side.reported({"a": [Report(1, 0.1)]})
    made.side.received({"a"}, ())
    assert [each.kind for each in made.side.happened] == ["dropped"]
    assert not made.side._promised and not made.side._reports and not made.side._asked


def test_a_question_that_became_needless_is_cancelled(tmp_path: Path) -> None:
    """Another request computed the same text meanwhile, so vLLM's own cache has it."""
    with serving(FakeServer({}, hanging)) as server:
        made = Side(tmp_path, server)
        asked = request("a", IDS)
        assert made.side.matched(asked, 0) == (None, False)
        until(lambda: server.asked)
        assert made.side.matched(asked, 16) == (0, False)
        made.side.allocated(asked, BLOCKS, 0)
        until(lambda: server.cancelled == [IDS])
    assert [each.kind for each in made.side.happened] == ["dropped"]


def test_short_prompts_are_never_asked_for(made: Side) -> None:
    assert made.side.matched(request("a", IDS[:8]), 0) == (0, False)
    assert made.side.matched(request("b", IDS), 12) == (0, False)
    assert made.settled(request("c", IDS[:9])) == (8, True)
    assert made.server.asked == [IDS[:9]]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"prompt_token_ids": None, "prompt_embeds": object()}, "prompt embeddings"),
        ({"mm_features": [1]}, "images or sound"),
        ({"lora_request": object()}, "a LoRA adapter"),
        ({"cache_salt": "x"}, "a cache_salt"),
        ({"pooling_params": object()}, "for pooling"),
        ({"resumable": True}, "goes on while"),
        ({"skip_reading_prefix_cache": True}, "prompt_logprobs"),
    ],
)
def test_requests_that_depend_on_more_than_token_ids_are_vllms_own(
    made: Side, more: dict[str, Any], words: str, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.runahead")
    asked = request("a", IDS, **more)
    assert {made.side.matched(asked, 0) for _ in range(5)} == {(0, False)}
    [line] = [record.message for record in caplog.records]
    assert words in line and not made.server.asked


def test_a_proxy_names_the_file(made: Side, tmp_path: Path) -> None:
    path = write(tmp_path, IDS, numbers(IDS))
    given = {"do_remote_prefill": True, "runahead_file": path.name}
    assert made.settled(request("a", IDS, kv_transfer_params=given)) == (19, True)
    assert made.settled(request("b", IDS, kv_transfer_params=given | {"runahead_file": None})) == (0, False)
    assert made.settled(request("c", IDS, kv_transfer_params=given | {"runahead_file": "../x"})) == (0, False)
    assert not made.server.asked


@pytest.mark.parametrize("other", ["prompt", "salt"])
def test_a_proxy_that_names_the_file_of_another_prompt_gets_no_answer_from_it(
    made: Side, tmp_path: Path, other: str, caplog: Any
) -> None:
    """Another prompt of as many tokens, as if two templates differ in a word; or one whose owner shares with nobody."""
    theirs = [*IDS[:5], 99, *IDS[6:]] if other == "prompt" else IDS
    path = write(tmp_path, theirs, numbers(theirs))
    if other == "salt":
        path = path.rename(tmp_path / file_name(KEY, "another salt", theirs))
    given = {"runahead_file": path.name}
    assert made.settled(request("a", IDS, kv_transfer_params=given)) == (0, False)
    assert "is not that of these 20 tokens: the prompt, its chat template" in caplog.text
    assert not made.server.asked


def test_a_call_whose_answer_has_begun_is_cancelled_at_once() -> None:
    """At "Connection: close" Python's client forgets its socket while the body is still to come."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server, call, ended = Server(f"http://127.0.0.1:{listening.getsockname()[1]}"), Call(), threading.Event()

        def ask() -> None:
            with suppress(ServerError):
                server.prefill(IDS, 3600, call)
            ended.set()

        threading.Thread(target=ask, daemon=True).start()
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 10\r\n\r\n{")
            until(lambda: call._socket is not None and call._socket._closed)  # type: ignore[attr-defined]
            call.cancel()
            assert ended.wait(20)
    call.cancel()  # once it has ended


def test_a_call_that_is_cancelled_as_its_socket_goes_raises_nothing() -> None:
    ours, theirs = socket.socketpair()
    call = Call()
    call.begin(ours)
    ours.close()
    theirs.close()
    call.cancel()
    with pytest.raises(ServerError, match="cancelled"):
        call.begin(ours)


def test_look_only_takes_what_is_there(tmp_path: Path) -> None:
    with serving(FakeServer({}, hanging)) as server:
        made = Side(tmp_path, server, look_only=True)
        assert made.settled(request("a", IDS)) == (0, False)
        write(tmp_path, IDS, numbers(IDS))
        assert made.settled(request("b", IDS)) == (19, True)
        assert not server.asked


def test_the_key_is_sent(tmp_path: Path) -> None:
    def prefill(ids: list[int], closed: Callable[[float], bool]) -> Answer:
        return 200, {"file": write(tmp_path, ids, numbers(ids)).name}

    with serving(FakeServer({}, prefill, api_key="secret")) as server:
        assert Side(tmp_path, server, key="secret").settled(request("a", IDS)) == (19, True)
        assert Side(tmp_path, server, key="wrong").settled(request("a", IDS)) == (0, False)
