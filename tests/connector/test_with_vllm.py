"""vLLM with the connector, against plain vLLM: the same greedy tokens, loaded, and whatever fails computed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connector.engines import engine, python_of_vllm
from tests.connector.fake_server import Answer, FakeServer, serving
from tests.connector.tiny_models import FAMILIES, Computed, save
from tests.connector.written import write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NEW = 24


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of_vllm()


def prompts(number: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random ones of 100 tokens or more, of which every third begins as the one before it does."""
    chance = random.Random(seed)
    made: list[list[int]] = []
    for place in range(number):
        ids = [chance.randrange(5, 576) for _ in range(chance.randrange(100, longest))]
        if place % 3 == 2:
            shared = made[-1][: chance.randrange(50, min(250, len(made[-1])))]
            ids = shared + ids[: max(100, len(ids) - len(shared))]  # more than vLLM would compute alone
        made.append(ids)
    return made


CASES = [
    *((family, 1, 6) for family in FAMILIES),
    ("llama", 2, 6),
    ("gemma3", 3, 6),
    ("qwen3", 3, 1),
]
"""Family, tensor-parallel ranks, kv heads: each rank has some, or a copy of the only one."""


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


FAULTS = (
    "none",
    "late",
    "hangs",
    "busy",
    "lost",
    "closed",
    "no json",
    "cut off",
    "damaged",
    "damaged later",
    "cut off later",
    "gone",
    "gone later",
    "foreign",
    "other prompt",
    "shorter prompt",
    "aborted",
)


class Faulty:
    """A server's prefill that does with each prompt what the drill wants.

    Attributes:
        fault: by the prompt's tokens.
    """

    def __init__(self, folder: Path, computed: Computed, chance: random.Random) -> None:
        self.folder, self.computed, self.chance = folder, computed, chance
        self.fault: dict[tuple[int, ...], str] = {}
        self.layers: dict[tuple[int, ...], Any] = {}

    def __call__(self, ids: list[int], closed: Callable[[float], bool]) -> Answer:
        fault = self.fault[tuple(ids)]
        match fault:
            case "busy":
                return 429, {"error": {"message": "the queue is full"}}
            case "lost":
                return 503, {"error": {"message": "a rank is lost"}}
            case "closed":
                return 0, None
            case "no json":
                return 200, b"<html>"
            case "hangs":
                closed(30)
                return 0, None
            case "late" | "aborted":
                closed(self.chance.random() * 0.3)
            case "shorter prompt":
                return 200, {"file": self._write(ids, ids[:-1]).name}
            case "other prompt":
                return 200, {"file": self._write(ids, [ids[0] ^ 1, *ids[1:]]).name}
        path = self._write(ids, ids)
        match fault:
            case "cut off":
                self._cut(path)
            case "damaged":
                self._damage(path)
            case "foreign":
                path = write(self.folder, ids, self.layers[tuple(ids)], model="another")
            case "gone":
                path.unlink()
            case "cut off later":
                self._later(self._cut, path)
            case "damaged later":
                self._later(self._damage, path)
            case "gone later":
                self._later(Path.unlink, path)
        return 200, {"file": path.name}

    def _write(self, ids: list[int], of: list[int]) -> Path:
        key = tuple(ids)
        if key not in self.layers:
            self.layers[key] = self.computed.layers(ids)
        return write(self.folder, of, [layer[: len(of)] for layer in self.layers[key]])

    def _later(self, what: Callable[[Path], object], path: Path) -> None:
        threading.Timer(self.chance.random() * 0.01, what, (path,)).start()

    def _cut(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(self.chance.randrange(path.stat().st_size))

    def _damage(self, path: Path) -> None:
        """One byte of keys and values; in place, as a failing memory would."""
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(self.chance.randrange(size // 2, size))
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 255]))


@pytest.fixture
def drilled(python: Path, tmp_path: Path) -> Iterator[tuple[Any, Faulty, list[list[int]], list[list[int]]]]:
    """vLLM with little room, so that requests are pre-empted; its server, prompts, and the answers of plain vLLM."""
    model, asked = save("gemma3", tmp_path / "model"), prompts(12, 500, seed=3)
    computed, folder = Computed(model), tmp_path / "handed"
    folder.mkdir()
    few = {"num_gpu_blocks_override": 70, "max_model_len": 640}
    with engine(python, model, tmp_path, None, **few) as plain:
        wanted = [plain.ask({"ids": [ids], "new": 60})["answers"][0]["tokens"] for ids in asked]
    faulty = Faulty(folder, computed, random.Random(4))
    with (
        serving(FakeServer(computed.about(folder), faulty)) as server,
        engine(python, model, tmp_path, {"server": server.url, "wait_s": 1.0}, **few) as vllm,
    ):
        yield vllm, faulty, asked, wanted


ROUNDS = 200


def test_no_fault_gives_a_wrong_answer_or_keeps_a_block(drilled: Any, tmp_path: Path) -> None:
    """Rounds of one to four requests side by side, each with a fault by chance; what is not aborted is right."""
    vllm, faulty, asked, wanted = drilled
    chance, seen, blocks = random.Random(5), Counter[str](), set[int]()
    for number in range(ROUNDS):
        places = chance.sample(range(len(asked)), chance.randrange(1, 5))
        faults = [chance.choice(FAULTS) for _ in places]
        for path in faulty.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)
        faulty.fault = {tuple(asked[place]): fault for place, fault in zip(places, faults, strict=True)}
        after = [chance.randrange(0, 60) if fault == "aborted" else None for fault in faults]
        line = {"ids": [asked[place] for place in places], "new": 60, "abort_after": after, "reset": True}
        found = vllm.ask(line)
        assert not found["hung"] and found["left"] == 0, (number, faults, found)
        blocks.add(found["free_blocks"])
        for place, fault, answer in zip(places, faults, found["answers"], strict=True):
            if fault != "aborted":
                assert answer is not None and answer["tokens"] == wanted[place], (number, fault, answer)
        seen.update(faults)
        seen["preempted"] += found["preempted"]
    assert len(blocks) == 1, f"blocks are lost: {blocks}"
    assert set(seen) == {*FAULTS, "preempted"} and seen["preempted"] > 0
    log = (tmp_path / "connector.log").read_text(encoding="utf-8")
    assert log.count(" s, loaded ") >= seen["none"] and log.count("given up") >= seen["busy"]
