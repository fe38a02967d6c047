"""Who asks a server that runs for long: names of keys, a file of keys that changes, what is told of strangers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from launch.server import request_log
from launch.server.errors import APIError
from launch.server.key_file import KeyFile
from launch.server.keys import Keys
from launch.server.options import ServeOptions
from launch.server.request_log import RequestLog
from runahead.serving.limits import QueueLimits
from tests.serving.fakes import Served, held, serving
from tests.serving.test_api import CHAT, CLIENT, HELLO, TEXT, connection_of, post, read_until
from tests.waiting import until

ANNE, BOB = "the-key-of-anne-1234", "the+key:of-bob-56789"
SHORT = {"prompt": [5, 6, 7], "max_tokens": 4}


def written(path: Path, *lines: str | bytes) -> str:
    """A file of these lines, in place of the one that was there."""
    new = path.with_suffix(".new")
    new.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    new.chmod(0o600)
    new.replace(path)
    return str(path)


def metrics_of(served: Served, key: str = ANNE) -> dict[str, str]:
    answer = CLIENT.get(served.url + "/metrics", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    return dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))


def asked(served: Served, key: str, body: dict[str, Any] = SHORT) -> httpx2.Response:
    return post(served, TEXT, body, headers={"authorization": f"Bearer {key}"})


def is_admitted(keys: Keys, key: str) -> bool:
    try:
        keys.admitted(f"Bearer {key}")
    except APIError:
        return False
    return True


def test_names_of_keys_are_in_the_log_and_in_metrics_and_keys_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    KeyFile(written(tmp_path / "keys", f"anne:  {ANNE}", BOB), keys := Keys())
    bob = keys.admitted(f"Bearer {BOB}").name
    assert re.fullmatch("key-[0-9a-f]{6}", bob), "what stands before the colon of a key that is no name is the key's"
    with serving(keys=keys, log=True) as served:
        for key in (ANNE, BOB, BOB):
            assert asked(served, key).status_code == 200
        assert asked(served, BOB, {"prompt": ""}).status_code == 400
        until(lambda: metrics_of(served).get(f'runahead:key_requests_total{{key="{bob}"}}') == "3")
        counts = {name: value for name, value in metrics_of(served).items() if "runahead:key_" in name}
    assert counts == {
        f'runahead:key_{what}_total{{key="{name}"}}': str(number)
        for name, numbers in (("anne", (1, 3, 4)), (bob, (3, 6, 8)))
        for what, number in zip(("requests", "prompt_tokens", "generation_tokens"), numbers, strict=True)
    }
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.endswith("2 keys, 1 with names; names, before the first colon of a line, are in the log")
    assert [line.split()[3] for line in lines] == ["anne", bob, bob, bob]
    assert not any(secret in line for secret in (ANNE, BOB) for line in lines)


@pytest.mark.parametrize(("path", "body"), [(TEXT, {"echo": True, "max_tokens": 0}), ("/v1/prefill", {})])
def test_new_tokens_that_nobody_is_given_are_not_counted(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    """One is computed, which the usage does not have. Seen to fail: both counters had it."""
    with serving(keys=Keys([ANNE]), handover=str(tmp_path)) as served:
        answer = post(served, path, {"prompt": [5, 6, 7], **body}, headers={"authorization": f"Bearer {ANNE}"})
        assert answer.json()["usage"]["completion_tokens"] == 0
        until(lambda: metrics_of(served).get('runahead:requests_total{ended="length"}') == "1")
        counts = {name: value for name, value in metrics_of(served).items() if "generation_tokens_total" in name}
    assert set(counts.values()) == {"0"} and len(counts) == 2, counts


def test_a_key_without_a_name_has_one_label_wherever_it_stands(tmp_path: Path) -> None:
    labels = []
    for lines in ((ANNE, BOB), (BOB, ANNE), (f"bob:{BOB}", ANNE)):
        KeyFile(written(tmp_path / "keys", *lines), keys := Keys())
        labels.append(keys.admitted(f"Bearer {ANNE}").name)
    assert len(set(labels)) == 1 and labels[0] != Keys([BOB]).admitted(f"Bearer {BOB}").name


def test_a_key_with_a_colon_stays_a_key_though_its_beginning_may_be_a_name(tmp_path: Path) -> None:
    KeyFile(written(tmp_path / "keys", f"abc:{ANNE}", BOB), keys := Keys())
    assert is_admitted(keys, f"abc:{ANNE}") and is_admitted(keys, ANNE)
    assert not is_admitted(keys, f"abd:{ANNE}") and not is_admitted(keys, f"abc:{BOB}") and not is_admitted(keys, "")
    whole, own = (keys.admitted(f"Bearer {key}") for key in (f"abc:{ANNE}", ANNE))
    assert whole == own and keys.salt(whole, None) == keys.salt(own, None)


def test_either_header_may_have_the_key() -> None:
    with serving(keys=Keys([ANNE])) as served:
        for others, status in (
            ({"authorization": "Basic YTpi"}, 200),
            ({"authorization": "Bearer another-key-1234567"}, 200),
            ({"authorization": ""}, 200),
            ({"authorization": "Basic YTpi", "x-api-key": "wrong"}, 401),
            ({"authorization": f"Bearer {ANNE}", "x-api-key": "wrong"}, 200),
        ):
            assert post(served, TEXT, SHORT, headers={"x-api-key": ANNE} | others).status_code == status, others
        assert metrics_of(served)["runahead:wrong_keys_total"] == "1"


def test_the_file_is_looked_at_though_nobody_reads_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(message: str) -> None:
        raise BrokenPipeError(message)

    file = KeyFile(written(tmp_path / "keys", ANNE), keys := Keys())
    monkeypatch.setattr("launch.server.key_file.say", broken)
    for lines in ((f"bob:{BOB}",), ("short",), (ANNE,)):
        written(tmp_path / "keys", *lines)
        file.look(), file.look()
    assert is_admitted(keys, ANNE) and not is_admitted(keys, BOB)


def test_unknown_fields_are_told_up_to_a_number_however_many_threads_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, log = list[str](), RequestLog(ServeOptions())

    def say(sentence: str) -> None:
        told.append(sentence)
        if len(told) == 1:  # as another thread would
            for number in range(2 * request_log.MOST_NAMES):
                log.ignored(f"other-{number}")

    monkeypatch.setattr(request_log, "say", say)
    log.ignored("first")
    assert len(told) == request_log.MOST_NAMES + 1
    assert [sentence.startswith("after 100 unknown") for sentence in told].count(True) == 1


def test_a_file_that_has_changed_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, carla = tmp_path / "keys", "the-key-of-carla-000"
    file = KeyFile(written(path, ANNE, BOB), keys := Keys())
    before = keys.salt(keys.admitted(f"Bearer {ANNE}"), None)
    with serving(keys=keys) as served, held(served.engine) as gate:
        with connection_of(served, SHORT, headers={"authorization": f"Bearer {BOB}"}) as connection:
            until(lambda: served.scheduler.num_running == 1)
            written(path, f"carla:{carla}", f"anne:{ANNE}")
            file.look()
            assert is_admitted(keys, BOB), "it may be half written"
            file.look()
            gate.set()
            read_until(connection, b'"finish_reason"')  # what was taken is answered
        assert [asked(served, key).status_code for key in (ANNE, BOB, carla)] == [200, 401, 200]
    assert keys.salt(keys.admitted(f"Bearer {ANNE}"), None) == before
    assert capsys.readouterr().err == f"serve.api_key_file={path} was read again: 2 keys, 2 with names, 2 new, 2 gone\n"
    for _ in range(3):
        file.look()
    assert capsys.readouterr().err == ""


def test_the_file_is_looked_at_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.server.key_file.LOOK_S", 0.01)
    KeyFile(written(tmp_path / "keys", ANNE), keys := Keys()).watch()
    with (tmp_path / "keys").open("a") as more:  # in place
        more.write(f"\nbob:{BOB}\n")
    until(lambda: is_admitted(keys, BOB))
    assert is_admitted(keys, ANNE)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([""], "has no key"),
        (["# none"], "has no key"),
        (["anne:short"], "has a key of less than 16 characters"),
        (["the-key-of-ännе-1234"], "has a key with a character that no header can have"),
        (["anne:the-key\tof-anne-1234"], "has a key with a character that no header can have"),
        ([b"\xff\xfe" + ANNE.encode()], "is not text"),
        (None, "No such file or directory"),
    ],
)
def test_while_the_file_is_damaged_the_keys_from_before_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str | bytes] | None, told: str
) -> None:
    path = tmp_path / "keys"
    file = KeyFile(written(path, ANNE), keys := Keys())
    for _ in range(2):
        if lines is None:
            path.unlink()
        else:
            written(path, *lines)
        for _ in range(4):
            file.look()
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and told in said[0] and said[0].endswith("the 1 keys from before stay")
        assert is_admitted(keys, ANNE) and not is_admitted(keys, "") and not is_admitted(keys, "short")
        written(path, BOB, ANNE)
        for _ in range(4):
            file.look()
        assert is_admitted(keys, ANNE) and is_admitted(keys, BOB)
        assert "2 keys" in capsys.readouterr().err
        written(path, ANNE)
        file.look(), file.look()
        assert not is_admitted(keys, BOB)
        capsys.readouterr()


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    file = KeyFile(written(path, ANNE), keys := Keys())
    for number in range(5):
        written(path, *[f"key-of-number-{each:06d}" for each in range(number + 1)])
        file.look()
        assert is_admitted(keys, ANNE) and not is_admitted(keys, "key-of-number-000000")
    file.look()
    assert all(is_admitted(keys, f"key-of-number-{each:06d}") for each in range(5)) and not is_admitted(keys, ANNE)


def test_strangers_are_counted_and_told_within_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(keys=Keys([ANNE]), log=True) as served:
        for number in range(30):
            wrong = f"Bearer wrong-key-{number:08d}"
            assert post(served, CHAT, HELLO, headers={"authorization": wrong}).status_code == 401
        for path, status in (("/admin", 404), ("/v1/nope", 404), (CHAT, 405)):
            answer = CLIENT.get(served.url + path)
            assert answer.status_code == status and answer.headers["x-request-id"]
        assert CLIENT.get(served.url + "/metrics").status_code == 401
        counts = metrics_of(served)
    assert counts["runahead:wrong_keys_total"] == "31" and counts["runahead:unrouted_requests_total"] == "3"
    assert not any("nope" in name or "wrong-key" in name or "admin" in name for name in counts)
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) == request_log.MOST_REFUSED and all(f" POST {CHAT} " in line for line in lines)
    assert last == "after 20 refused requests in a minute no more are told; /metrics counts them"
    assert not any("wrong-key" in line for line in lines)


def test_in_the_next_minute_strangers_are_told_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MINUTE_S", 0.0)
    with serving(log=True) as served:
        for number in range(25):
            assert CLIENT.get(f"{served.url}/{number}").status_code == 404
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"GET /(\d+) .* s: 404$", line).group(1) for line in lines] == list(map(str, range(25)))  # type: ignore[union-attr]


def test_metrics_of_the_process_are_those_that_the_system_tells() -> None:
    with serving() as served:
        before, process = metrics_of(served), psutil.Process()
        descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
        after = metrics_of(served)
        for each in descriptors:
            os.close(each)
    assert float(after["process_start_time_seconds"]) == pytest.approx(process.create_time(), abs=0.01)
    assert int(after["process_open_fds"]) - int(before["process_open_fds"]) == pytest.approx(50, abs=5)
    times = process.cpu_times()
    assert float(before["process_cpu_seconds_total"]) <= float(after["process_cpu_seconds_total"])
    assert 0 < float(after["process_cpu_seconds_total"]) <= times.user + times.system + 0.01
    assert int(after["process_resident_memory_bytes"]) == pytest.approx(process.memory_info().rss, rel=0.2)
    assert int(after["process_virtual_memory_bytes"]) > int(after["process_resident_memory_bytes"])


def test_the_share_of_memory_is_that_of_the_rows() -> None:
    with serving(limits=QueueLimits(max_tokens=100)) as served, held(served.engine) as gate:
        assert float(metrics_of(served)["runahead:kv_cache_usage_perc"]) == 0
        with connection_of(served, {"prompt": [5] * 10, "max_tokens": 40}) as connection:
            until(lambda: served.scheduler.num_running == 1)
            assert float(metrics_of(served)["runahead:kv_cache_usage_perc"]) == 0.5
            gate.set()
            read_until(connection, b'"finish_reason"')
        until(lambda: float(metrics_of(served)["runahead:kv_cache_usage_perc"]) == 0)
    with serving(limits=QueueLimits()) as served:
        assert "runahead:kv_cache_usage_perc" not in metrics_of(served)
