"""The comparison with kvpress: what both sides are asked, budgets of its methods, and pairs; without kvpress itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.evaluation.contenders import contenders
from benchmarks.harness.lines import Line
from benchmarks.studies.kvpress import kvpress_quality
from benchmarks.studies.kvpress.__main__ import padding_share, share
from benchmarks.studies.kvpress.kvpress_quality import STUDY
from benchmarks.studies.kvpress.methods import METHODS
from benchmarks.studies.kvpress.paired_sides import pairs, tables
from tests.families import build
from tests.unit.tokenizers_for_tests import byte_level


@dataclass
class Press:
    """Stands for any press: it has its options, and drops nothing."""

    compression_ratio: float = 0.0
    press: Any = None
    options: dict[str, Any] | None = None

    def __init__(self, compression_ratio: float = 0.0, press: Any = None, **options: Any) -> None:
        self.compression_ratio, self.press, self.options = compression_ratio, press, options

    def __call__(self, model: Any) -> nullcontext[None]:
        return nullcontext()

    def post_init_from_model(self, model: Any) -> None:
        pass

    def forward_hook(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Marks the first token of the first head in each layer; as kvpress does, under `masked_key_indices`."""
        module.masked_key_indices = torch.tensor([0]), torch.tensor([0]), torch.tensor([0])


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of kvpress's environment, where every press is a `Press`."""
    stand_in: Any = ModuleType("kvpress")
    for name in ("AdaKV", "ExpectedAttention", "KeyDiff", "KVzip", "SnapKV", "StreamingLLM"):
        setattr(stand_in, f"{name}Press", type(f"{name}Press", (Press,), {}))
    monkeypatch.setitem(sys.modules, "kvpress", stand_in)
    own = ["benchmarks.studies.kvpress.presses", "benchmarks.studies.kvpress.answered"]
    yield SimpleNamespace(**{name.rpartition(".")[2]: import_module(name) for name in own})
    for name in own:
        del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_level()
    options: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_id": None, "max_position_embeddings": 1024}
    build("llama", dtype=torch.float32, **options).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_press_keeps_the_budget_however_kvpress_rounds(theirs: Any) -> None:
    """With 1 - budget / length as its share a press keeps a token less at some lengths, as 1 - (1 - x) < x there."""
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=5, num_key_value_heads=3))
    for length, budget in product(range(100, 400, 7), range(1, 90, 11)):
        of_head = theirs.presses.press_of(model, METHODS["adakv over snapkv"].asked(budget), length)
        assert int(length * (1 - of_head.press.compression_ratio)) == budget
        assert (
            of_head.press.options == {"window_size": 64, "kernel_size": 5} and of_head.options["alpha_safeguard"] == 0
        )
        of_all = theirs.presses.press_of(model, METHODS["kvzip"].asked(budget), length)
        assert 15 * length - int(15 * length * of_all.compression_ratio) == 15 * budget


def test_all_methods_are_there_on_both_sides(theirs: Any) -> None:
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2, num_key_value_heads=2))
    made = contenders([method.ours for method in METHODS.values()], [0.5])
    assert len({each.label for each in made}) == len(METHODS)
    kinds = {type(theirs.presses.press_of(model, method.asked(50), 200)).__name__ for method in METHODS.values()}
    assert len(kinds) == len(METHODS) - 1  # adakv is there twice


def test_marked_slots_count_as_dropped(theirs: Any) -> None:
    marks = torch.tensor([0, 0, 0]), torch.tensor([1, 1, 0]), torch.tensor([3, 5, 0])
    attentions = [SimpleNamespace(masked_key_indices=marks), SimpleNamespace(masked_key_indices=None), object()]
    model = SimpleNamespace(
        config=SimpleNamespace(num_key_value_heads=2),
        model=SimpleNamespace(layers=[SimpleNamespace(self_attn=each) for each in attentions]),
    )
    assert theirs.presses.masked(model) == [[{0}, {3, 5}], [set(), set()], [set(), set()]]


def test_both_sides_answer_the_same_questions_and_the_study_goes_on(
    theirs: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Loses its agreement if kvpress is asked from another position on, or with another question or reference.

    The answer of a set is generated on both sides, and has no loss.
    """
    requests: list[dict[str, Any]] = []

    def started(python: Path, module: str, args: list[Path], *, scratch: str) -> Any:
        request = json.loads(args[0].read_text())
        requests.append(request)
        model = theirs.answered.AutoModelForCausalLM.from_pretrained(request["model"]).eval()
        with torch.inference_mode():
            told = [
                json.dumps(answer) + "\n"
                for asked in request["questions"]
                for answer in theirs.answered.answers(model, asked)
            ]
        return SimpleNamespace(stdout=StringIO("".join(told)), kill=lambda: None, wait=lambda: None)

    monkeypatch.setattr(kvpress_quality, "environment", lambda: Path("python"))
    monkeypatch.setattr(kvpress_quality, "versions", lambda python: {"kvpress": "0.5.5"})
    monkeypatch.setattr(kvpress_quality, "start", started)
    lines = tmp_path / "q.jsonl"
    options = ["--model", str(folder), "--tasks", "niah_single_1", "niah_multivalue", "--methods", "snapkv"]
    options += ["--samples", "1", "--lengths", "480", "--budget", "0.4", "--lines", str(lines), "--out", str(tmp_path)]
    STUDY.main(options)
    found = [json.loads(text) for text in lines.read_text().splitlines()]
    kinds = ("niah_single_1", "niah_multivalue")
    assert [("kvpress" in each, each["method"], each["case"]["kind"]) for each in found] == [
        (side, method, kind) for side in (False, True) for kind in kinds for method in ("full", "snapkv")
    ]
    for own, other in zip(found[:4], found[4:], strict=True):
        assert (own["full_kv_bytes"], own["num_tokens"]) == (other["full_kv_bytes"], other["num_tokens"])
        assert other["kv_bytes"] == other["full_kv_bytes"]
        if own["method"] == "full":
            is_set = own["case"]["kind"] == "niah_multivalue"
            nlls = [each["details"]["nll"] for each in (own, other)]
            assert nlls == [None, None] if is_set else nlls[1] == pytest.approx(nlls[0], abs=1e-5)
            assert own["details"]["answer"] == other["details"]["answer"] and other["seen_share"] == 1
        else:
            assert other["kept_tokens"] == [own["num_tokens"] - 0.5] * 3  # a token of one of two heads is marked
            assert own["kept_tokens"] == [round(0.4 * own["num_tokens"])] * 3
    [asked, _] = requests[0]["questions"]
    assert [press and press["budget"] for press in asked["presses"]] == [None, found[1]["kept_tokens"][0]]
    lines.write_text("".join(json.dumps(each) + "\n" for each in found[:-1]))
    STUDY.main(options)  # goes on after an interruption
    again = [json.loads(text) for text in lines.read_text().splitlines()]
    assert again[:-1] == found[:-1] and again[-1]["key"] == found[-1]["key"]
    assert [len(asked["presses"]) for asked in requests[1]["questions"]] == [1]
    STUDY.main(options)
    assert len(requests) == 2 and len(lines.read_text().splitlines()) == len(found)
    capfd.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "1.5"], "--budget 1.5 must be a share"),
        (["--lengths", "400"], "--lengths 400 at --budget 0.25 .* use a length above 512"),
        (["--tasks", "qa_1"], "ruler.tasks has qa_1, which needs ruler.squad"),
        (["--model", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message) as ended:
        STUDY.main(["--lines", str(tmp_path / "q.jsonl"), "--out", str(tmp_path), *options])
    assert "\n" not in str(ended.value)


def line(method: str, sample: int, score: float, *, theirs: bool = False, nll: float = 1.0) -> Line:
    """A line of an answer."""
    of_side = {"kvpress": {"kvpress": "0.5.5", "torch": "2.13.0"}} if theirs else {}
    return of_side | {
        "task": "ruler",
        "method": method,
        "budget": None if method == "full" else 0.25,
        "case": {"kind": "vt", "length": 1024, "sample": sample},
        "score": score,
        "seen_share": 1.0 if method == "full" else 0.25,
        "kv_bytes": 100 if theirs or method == "full" else 25,
        "full_kv_bytes": 100,
        "details": {"nll": nll},
        "model": "m",
        "commit": "abc",
        "task_settings": {"question": "separate"},
    }


def test_sides_are_compared_question_by_question() -> None:
    """Means over all of a side's questions would differ by those that the other side has not answered yet."""
    found = [line("full", sample, 1.0, theirs=theirs) for sample in range(8) for theirs in (False, True)]
    found += [line("kvzip", sample, float(sample < 6), nll=1.5 + (sample >= 6)) for sample in range(8)]
    found += [line("kvzip", sample, 0.5, nll=1.25 + sample / 10, theirs=True) for sample in range(6)]
    [((setting, budget), (full, kvzip))] = pairs(found).items()
    assert setting == ("m", "separate", "1,024 tokens") and budget == "25%"
    assert (full.questions, full.largest, kvzip.questions) == (8, 0.0, 6)
    assert (kvzip.ours.score, kvzip.theirs.score, kvzip.score.mean) == (1.0, 0.5, 0.5)
    assert (kvzip.ours.kept_share, kvzip.theirs.kept_share) == (0.25, 1.0)
    assert kvzip.ours.loss_over_full == 0.5 and kvzip.theirs.loss_over_full == pytest.approx(0.5)
    assert kvzip.loss.mean == pytest.approx(0.0) and kvzip.largest == pytest.approx(0.25)
    assert kvzip.loss.interval is not None and kvzip.loss.interval[0] < 0 < kvzip.loss.interval[1]
    text = tables(found)
    assert "**m, 1,024 tokens, 25% kept**: 8 questions; kvpress 0.5.5, torch 2.13.0; commit abc" in text
    assert "| kvzip | 25% / 25% | 25% / 100% | 100% / 50% | +0.50 / +0.50 | +50 (+50 to +50) | +0.00" in text


def test_shares_of_kept_tokens_count_heads_by_what_they_keep() -> None:
    ours, theirs = [[[0, 1, 2, 3], [5]]], [[[0, 1, 2, 4], [6]]]
    assert share(ours, theirs) == 3 / 5 and share(ours, ours) == 1
    assert padding_share([[[-2, -1, 0, 1], [0, 1, 2, 3]]], 4) == 2 / 8
