"""vLLM with the connector, against plain vLLM: the same greedy tokens, loaded, and whatever fails computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connector import drill
from tests.connector.drill import prompts
from tests.connector.engines import engine, python_of_vllm
from tests.connector.fake_server import Answer, FakeServer, serving
from tests.connector.faulty import FAULTS, KILLS, Faulty
from tests.connector.tiny_models import FAMILIES, Computed, save
from tests.connector.written import numbers, write
from tests.waiting import until


def needs_vllm(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that takes minutes."""
    return pytest.mark.slow(pytest.mark.timeout(1800)(test))


NEW = 24


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of_vllm()


CASES = [
    *((family, 1, 6) for family in FAMILIES),
    *((family, 2, 6) for family in ("llama", "qwen3", "gemma2", "gemma3")),
    *((family, 3, 6) for family in ("gemma2", "gemma3")),
    ("qwen3", 3, 1),
]
"""Family, tensor-parallel ranks, kv heads: each rank has some, or a copy of the only one."""


@needs_vllm
@pytest.mark.parametrize(("family", "ranks", "kv_heads"), CASES)
def test_answers_are_plain_vllms(python: Path, tmp_path: Path, family: str, ranks: int, kv_heads: int) -> None:
    """Ten prompts one after another, then all at once; all are loaded, not computed."""
    model, asked = save(family, tmp_path / "model", kv_heads), prompts(10, 900)
    computed, folder = Computed(model), tmp_path / "handed"
    folder.mkdir()
    more = {"tensor_parallel_size": ranks} if ranks > 1 else {}

    def prefill(ids: list[int], closed: Callable[[float], bool]) -> Answer:
        return 200, {"file": write(folder, ids, computed.layers(ids)).name}

    with engine(python, model, tmp_path, None, **more) as plain:
        wanted = [plain.ask({"ids": [ids], "new": NEW})["answers"][0]["tokens"] for ids in asked]
    assert len({tuple(each) for each in wanted}) == len(asked), "the model says something of each prompt"
    with (
        serving(FakeServer(computed.about(folder), prefill)) as server,
        engine(python, model, tmp_path, {"server": server.url}, **more) as vllm,
    ):
        alone = [vllm.ask({"ids": [ids], "new": NEW}) for ids in asked]
        together = vllm.ask({"ids": asked, "new": NEW, "reset": True})
        again = vllm.ask({"ids": asked[:1], "new": NEW})
    for found in ([each["answers"][0] for each in alone], together["answers"]):
        assert [answer["tokens"] for answer in found] == wanted
        assert [answer["cached"] for answer in found] == [len(ids) - 1 for ids in asked]
    assert together["left"] == 0 and not together["hung"]
    assert again["answers"][0]["tokens"] == wanted[0]
    log = (tmp_path / "connector.log").read_text(encoding="utf-8")
    assert log.count(" s, loaded ") >= 18 and "given up" not in log


@needs_vllm
def test_a_few_rounds_of_the_drill_are_as_they_should_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drill itself has 200 rounds: `python -m tests.connector.drill`."""
    lines = tmp_path / "lines.jsonl"
    assert drill.main(["--rounds", "6", "--lines", str(lines)]) == 0
    assert "6 rounds" in capsys.readouterr().out and len(lines.read_text().splitlines()) == 6
    assert drill.main(["--rounds", "6", "--lines", str(lines)]) == 0, "nothing is left to do"


def test_the_drill_goes_through_all_faults_and_kills() -> None:
    rounds = [drill.plan(1, number)[:2] for number in range(200)]
    assert {fault for _, faults in rounds for fault in faults} == {*FAULTS, *KILLS}
    assert {len(places) for places, _ in rounds} == {1, 2, 3, 4}
    assert rounds == [drill.plan(1, number)[:2] for number in range(200)], "a round is the same when it is run again"


@pytest.mark.parametrize(
    ("fault", "answer", "how"),
    [
        ("late", {"tokens": [7] * drill.NEW, "cached": 99}, "loaded"),
        ("late", {"tokens": [7] * drill.NEW, "cached": 32}, "computed"),
        ("late", {"tokens": [7] * (drill.NEW - 1) + [8], "cached": 99}, "wrong tokens"),
        ("late", {"tokens": [7] * 3, "cached": 99}, "wrong tokens"),
        ("late", None, "wrong: no answer"),
        ("aborted", None, "aborted"),
        ("aborted", {"tokens": [7] * 3, "cached": 0}, "aborted"),
        ("aborted", {"tokens": [8] * drill.NEW, "cached": 0}, "wrong tokens"),
    ],
)
def test_the_drill_knows_a_wrong_answer(fault: str, answer: dict[str, Any] | None, how: str) -> None:
    assert drill.how(fault, answer, wanted=[7] * drill.NEW, num_tokens=100) == how
    told = drill.table([{"asked": [{"fault": fault, "how": how}], "preempted": 2, "problems": [how]}])
    assert "1 rounds, 2 pre-emptions, 1 rounds with problems" in told
    [row] = [line for line in told.splitlines() if line.startswith(f"| {fault} |")]
    assert row.endswith("| 1 |") == how.startswith("wrong")


def test_a_proxy_does_to_files_what_the_drill_wants(tmp_path: Path) -> None:
    """Behind it a server that has a file of each prompt."""

    def prefill(ids: list[int], closed: Callable[[float], bool]) -> Answer:
        return 200, {"file": write(tmp_path, ids, numbers(ids)).name}

    ids, killed = [5, 6, 7, 8], list[str]()
    with serving(FakeServer({}, prefill)) as server:
        proxy = Faulty(tmp_path, lambda: server.url, killed.append)
        for fault, is_there, is_whole in (
            ("none", True, True),
            ("cut off", True, False),
            ("damaged", True, False),
            ("gone", False, False),
            ("foreign", True, True),
            ("vLLM killed", True, True),
        ):
            proxy.fault[tuple(ids)] = fault
            status, answer = proxy(ids, lambda seconds: False)
            path = tmp_path / answer["file"]
            assert (status, path.exists()) == (200, is_there)
            assert not is_there or drill.whole(path) == is_whole, fault
        until(lambda: killed == ["vLLM killed"])
        for fault, status in (("busy", 429), ("full", 507), ("lost", 503), ("closed", 0)):
            proxy.fault[tuple(ids)] = fault
            assert proxy(ids, lambda seconds: False)[0] == status
        proxy.fault[tuple(ids)] = "shorter prompt"
        assert proxy(ids, lambda seconds: False)[1]["file"] != path.name
