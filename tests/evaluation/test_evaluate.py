"""The program: what it writes, what it goes on from, and what it draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluation import plot
from benchmarks.evaluation.evaluate import evaluate
from benchmarks.evaluation.plan import Plan
from benchmarks.harness import machine
from launch.evaluate import EVALUATE, main
from runahead import Ranks

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    path = tmp_path_factory.mktemp("text") / "sea.txt"
    path.write_text(text)
    return path


def arguments(folder: Path, text_file: Path, report: Path, *more: str) -> list[str]:
    return [
        "model=hf",
        f"model.path={folder}",
        "model.dtype=float32",
        f"text.file={text_file}",
        "policies=[full,{name:snapkv,window:4},{name:pyramidinfer,min_tokens:8}]",
        "tasks=[perplexity,copy,passkey,needle,throughput]",
        "budgets=[0.3,0.6]",
        "perplexity.tokens=64",
        "perplexity.chunk=32",
        "copy.passage=16",
        "copy.filler=32",
        "copy.samples=2",
        "passkey.lengths=[150]",
        "passkey.depths=[0,1]",
        "passkey.new_tokens=2",
        "needle.lengths=[200]",
        "needle.depths=[0.5]",
        "needle.new_tokens=2",
        "throughput.prompt_tokens=96",
        "throughput.new_tokens=4",
        "throughput.kv_tokens=2000",
        "throughput.rounds=2",
        "ranks.device=cpu",
        "ranks.threads=1",
        f"report={report}",
        *more,
    ]


@pytest.fixture(scope="module")
def evaluated(folder: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    report = tmp_path_factory.mktemp("report") / "eval.json"
    assert main(arguments(folder, text_file, report)) == 0
    return report


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


NUM_CASES = {"perplexity": 1, "copy": 2, "passkey": 2, "needle": 1, "throughput": 2}
CONTENDERS = 5


def test_every_policy_is_measured_in_every_case_in_turn(evaluated: Path) -> None:
    found = lines_of(evaluated.with_suffix(".jsonl"))
    assert {task: sum(line["task"] == task for line in found) for task in NUM_CASES} == {
        task: number * CONTENDERS for task, number in NUM_CASES.items()
    }
    turns = [(line["policy"], line["budget"]) for line in found if line["task"] == "throughput"]
    assert turns[:CONTENDERS] == turns[CONTENDERS:] and len(set(turns)) == CONTENDERS


def test_the_report_has_scores_bytes_and_times(evaluated: Path) -> None:
    report = json.loads(evaluated.read_text())
    assert len(report["results"]) == len(NUM_CASES) * CONTENDERS
    for row in report["results"]:
        assert row["measurements"] == NUM_CASES[row["task"]]
        assert row["ttft_s"] > 0 and row["tpot_s"] > 0 and row["kv_share"] == row["kv_bytes"] / row["full_kv_bytes"]
        assert all(0 < share <= 1 for share in row["kept_shares"])
        if row["policy"].startswith("snapkv") and row["task"] == "copy":
            assert sum(row["kept_shares"]) / len(row["kept_shares"]) == pytest.approx(row["budget"], abs=0.1)
    batches = {row["policy"]: row["batch"] for row in report["results"] if row["task"] == "throughput"}
    assert batches["full"] == 2000 // 99 and min(batches.values()) >= 1
    cells = [len(row["cells"]) for row in report["results"] if row["task"] == "passkey"]
    assert cells == [2] * CONTENDERS


def test_pictures_are_beside_the_report_and_come_from_the_lines_alone(evaluated: Path, tmp_path: Path) -> None:
    names = json.loads(evaluated.read_text())["pictures"]
    assert names == [f"eval_{kind}.png" for kind in ("quality", "passkey", "needle", "pyramid")]
    assert all((evaluated.parent / name).read_bytes().startswith(PNG) for name in names)
    assert plot.main(["--lines", str(evaluated.with_suffix(".jsonl")), "--out", str(tmp_path / "again")]) == 0
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == sorted(names)
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (evaluated.parent / name).read_bytes()


def test_a_finished_evaluation_measures_nothing_again(
    evaluated: Path, folder: Path, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = evaluated.with_suffix(".jsonl")
    before, report = path.read_bytes(), json.loads(evaluated.read_text())
    assert main(arguments(folder, text_file, evaluated)) == 0
    out, err = capfd.readouterr()
    assert path.read_bytes() == before and "nothing to do" in err
    assert json.loads(evaluated.read_text())["results"] == report["results"]
    assert all(name in out for name in NUM_CASES) and out.count("pyramidinfer(min_tokens=8)") == 2 * len(NUM_CASES)


def test_an_interrupted_evaluation_goes_on_from_its_lines(
    evaluated: Path, folder: Path, text_file: Path, tmp_path: Path
) -> None:
    whole = lines_of(evaluated.with_suffix(".jsonl"))
    copied = [line for line in whole if line["task"] in ("copy", "passkey")]
    lines = tmp_path / "part.jsonl"
    kept = [line for at, line in enumerate(copied) if at not in (2, 7)]
    lines.write_text("".join(json.dumps(line) + "\n" for line in kept))
    more = ["tasks=[copy,passkey]", f"lines={lines}"]
    assert main(arguments(folder, text_file, tmp_path / "part.json", *more)) == 0
    found = lines_of(lines)
    assert found[: len(kept)] == kept
    assert [line["key"] for line in found[len(kept) :]] == [copied[2]["key"], copied[7]["key"]]
    assert [line["score"] for line in found[len(kept) :]] == [copied[2]["score"], copied[7]["score"]]


def test_what_decides_a_measurement_is_in_its_key(evaluated: Path, folder: Path, text_file: Path) -> None:
    """Another chunk is another perplexity; copy does not ask for chunks."""
    lines = evaluated.with_suffix(".jsonl")
    run = EVALUATE.compose(
        arguments(folder, text_file, evaluated, "perplexity.chunk=16", "tasks=[perplexity,copy]", f"lines={lines}")
    )
    with Ranks.start(run.ranks) as ranks:
        missing = Plan.from_options(run, ranks).missing()
    assert [name for name, _, _ in missing] == ["perplexity"] * CONTENDERS


@pytest.mark.parametrize(("field", "other"), [("hardware", {"cpu": "another"}), ("code", "another")])
def test_measurements_of_another_machine_or_code_count_only_where_the_plan_says_so(
    field: str, other: object, evaluated: Path, folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = evaluated.with_suffix(".jsonl")
    run = EVALUATE.compose(arguments(folder, text_file, evaluated, "tasks=[copy]", f"lines={lines}"))
    monkeypatch.setattr(machine, field, lambda *packages: other)
    with Ranks.start(run.ranks) as ranks:
        strict, across = (Plan.from_options(run, ranks, across=fields) for fields in ([], [field]))
    assert len(strict.missing()) == len(strict._steps()) > 0 and strict.select(strict.done) == []
    assert across.missing() == [] and len(across.select(across.done)) == len(across._steps())


def test_a_policy_of_a_file_is_measured_again_after_a_change_of_the_file(
    folder: Path, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under every budget as one policy; what cannot have one says so below the table."""
    own = tmp_path / "mine.py"
    own.write_text(
        "from dataclasses import dataclass\nfrom policies.scorer import Scorer\n@dataclass(kw_only=True)\n"
        "class Mine(Scorer):\n    def score(self, view):\n        return view.k_BKnH.norm(dim=-1)\n"
    )
    more = [f"policies=[full,{{name:file,path:{own}}},{{name:quest,page:4}}]", "tasks=[copy]", "copy.samples=1"]
    options = arguments(folder, text_file, tmp_path / "eval.json", *more)
    assert main(options) == 0
    report = json.loads((tmp_path / "eval.json").read_text())
    kept = {(row["policy"], row["budget"]): row["kept_shares"][0] for row in report["results"]}
    policy = str(own)
    assert kept.keys() == {("full", None), (policy, 0.3), (policy, 0.6), ("quest(page=4)", None)}
    assert kept[policy, 0.3] < 0.4 < kept[policy, 0.6] < 0.7 and kept["full", None] == 1.0
    note = "quest(page=4) ran once: it keeps all keys and values; its option fetch says how many of them a token reads"
    assert note in capfd.readouterr().out and report["results"][-1]["once"] in note
    own.write_text(own.read_text().replace("norm(dim=-1)", "norm(p=1, dim=-1)"))
    run = EVALUATE.compose(options)
    with Ranks.start(run.ranks) as ranks:
        missing = Plan.from_options(run, ranks).missing()
    assert [contender.name for _, _, contender in missing] == [f"{policy}, 30%", f"{policy}, 60%"]


def test_a_text_too_long_for_the_full_cache_is_measured_without_it(
    folder: Path, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only a cache of a fixed size reads it; the column over full is not empty without a word."""
    more = ["tasks=[perplexity]", "perplexity.tokens=700", "perplexity.chunk=64"]
    bounded = "policies=[{name:streaming_llm,budget:64,positions:reencoded}]"
    assert main(arguments(folder, text_file, tmp_path / "eval.json", *more, bounded)) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[-2].startswith("policies= lacks full, which cannot be measured here: perplexity.tokens=700 under full")
    assert out[-1] == "over full is - where the full cache was not measured in the same cases"
    [row] = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert row["over_full"] is None and row["policy"].startswith("streaming_llm")


def test_a_policy_that_a_model_does_not_take_is_named(folder: Path, text_file: Path, tmp_path: Path) -> None:
    """The model has fewer positions than em_llm by default attends to, which its own message does not say."""
    more = ["tasks=[copy]", "policies=[full,snapkv,em_llm]"]
    run = EVALUATE.compose(arguments(folder, text_file, tmp_path / "eval.json", *more))
    says = "^em_llm: policy.recent=4096 is the distance of all tokens before"
    with Ranks.start(run.ranks) as ranks, pytest.raises(ValueError, match=says):
        evaluate(run, ranks)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["text.file=nowhere.txt"], "text.file=nowhere.txt does not exist; check the path"),
        (["perplexity.tokens=100000"], "tokens but perplexity needs 100,000; give a longer text.file or fewer"),
        (["policies=[full,snapkw]"], "policies=snapkw is not one of full"),
        (["policies=[{name:window,kernel:3}]"], "policies: window has no option kernel"),
        (["report=no/where.json"], "there is no folder"),
        (
            ["model=random", "model.path=null", "model.config=CONFIG_ALONE"],
            "needs a tokenizer, and this model has none",
        ),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(
    more: list[str], says: str, folder: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = text_file.parent / "config.json"
    alone.write_bytes((folder / "config.json").read_bytes())
    more = [option.replace("CONFIG_ALONE", str(alone)) for option in more]
    run = EVALUATE.compose(arguments(folder, text_file, tmp_path / "eval.json", *more))
    monkeypatch.setattr("runahead.model.model.Model.load", lambda *_, **__: pytest.fail("the model was loaded"))
    with Ranks.start(run.ranks) as ranks, pytest.raises(ValueError, match=says) as caught:
        evaluate(run, ranks)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_several_ranks_are_refused(folder: Path, text_file: Path, tmp_path: Path) -> None:
    run = EVALUATE.compose(arguments(folder, text_file, tmp_path / "eval.json"))
    with Ranks.start(run.ranks) as ranks:
        ranks.size = 2
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="on one rank but 2 were started"):
            patch.setattr(ranks, "on_rank_0", lambda what, find: find())
            evaluate(run, ranks)
        ranks.size = 1


def test_lines_of_something_else_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"variant": "single"}\n')
    assert plot.main(["--lines", str(path)]) == 2
    assert capfd.readouterr().err == f"lines={path}: line 1 is no measurement; remove it, or name another file\n"
    assert plot.main(["--lines", str(tmp_path / "none.jsonl")]) == 2
    assert "has no lines; measure some with launch/evaluate.py" in capfd.readouterr().err


def test_tables_come_from_the_lines_too(evaluated: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert plot.main(["--lines", str(evaluated.with_suffix(".jsonl")), "--table"]) == 0
    out = capfd.readouterr().out
    assert out.count("| policy |") == len(NUM_CASES) and out.count("| full |") == len(NUM_CASES)
