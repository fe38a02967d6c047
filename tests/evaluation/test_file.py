"""Questions of a user's own: how lines are read, answers are scored, and mistakes are told."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluation import summary
from benchmarks.evaluation.contenders import contenders
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.options import FileTaskOptions, Question, Score
from benchmarks.evaluation.tasks.base import Runtime
from benchmarks.evaluation.tasks.file import FileTask, contained, exact_match, f1
from benchmarks.harness import machine
from launch.evaluate import main
from runahead import Conversation, Model, Ranks, RanksOptions
from runahead.config import Device
from tests.exit_status import exit_status, one_line_error

SEA = "The ice is far from the sea. " * 8


def written(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def own(**more: Any) -> dict[str, Any]:
    return {"prompt": SEA, "question": "What is far? The", "answers": ["ice", "the cold ice"], **more}


LONGBENCH = {
    "input": "Who went to the sea?",
    "context": SEA,
    "answers": ["his sister", "a captain"],
    "length": 70,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "5a",
}


def task(material: Material, path: str, **options: Any) -> FileTask:
    return FileTask(FileTaskOptions(path=path, **options), material)


@pytest.fixture(scope="module")
def runtime(model: Model) -> Runtime:
    return Runtime(model=model, ranks=Ranks.start(RanksOptions(device=Device.cpu, threads=1)))


def test_prompt_and_question_are_verbatim(material: Material, tmp_path: Path) -> None:
    found = task(material, written(tmp_path / "own.jsonl", own(), {"prompt": "  a\n", "answers": "b"}), samples=None)
    assert [case["line"] for case in found.cases] == [1, 2]
    first, second = map(found.item, found.cases)
    decode = material.tokenizer.decode
    assert decode(first.context) == SEA and decode(first.question) == "What is far? The"
    assert (first.reference, second.reference) == (" ice", "b")  # apart from the words before, where they end in one
    assert (decode(second.context), second.question, second.answers) == ("  a\n", [], ["b"])
    assert found.metric.name == "contained" and first.new_tokens == 32 and first.generates
    assert found.score("no\nICE", first) == 1.0  # wherever it is in the answer
    assert [case["line"] for case in task(material, str(tmp_path / "own.jsonl"), samples=1).cases] == [1]


def test_longbenchs_lines_have_the_metric_and_the_length_of_their_data_set(material: Material, tmp_path: Path) -> None:
    trivia = LONGBENCH | {"dataset": "triviaqa_e", "input": "Question: which?\nAnswer:"}
    found = task(material, written(tmp_path / "longbench.jsonl", LONGBENCH, trivia))
    assert found.metric.name == "F1" and [case["kind"] for case in found.cases] == ["hotpotqa", "triviaqa"]
    asked, continued = map(found.item, found.cases)
    question, examples = (material.tokenizer.decode(item.question) for item in (asked, continued))
    assert question.endswith("Question: Who went to the sea?\nAnswer:") and asked.new_tokens == 32
    assert examples == "\n\nQuestion: which?\nAnswer:"
    assert found.score("A captain.\nOf a ship", asked) == pytest.approx(2 / 4)  # 1 of 3 words, which is all of 1
    assert found.score("A captain.\nOf a ship", continued) == 1.0  # the first line alone
    assert task(material, str(tmp_path / "longbench.jsonl"), metric=Score.contained).metric.name == "contained"


@pytest.mark.parametrize(
    ("score", "answer", "wanted", "expected"),
    [
        (exact_match, "The  Ice!", "an ice", 1.0),
        (exact_match, "the ice melts", "an ice", 0.0),
        (contained, "It is THE ICE that melts", "ice", 1.0),
        (contained, "icy", "ice", 0.0),
        (f1, "the ice", "an ice", 1.0),
        (f1, "ice and snow", "an ice", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        (f1, "", "an ice", 0.0),
    ],
)
def test_answers_are_compared_as_squad_does(score: Any, answer: str, wanted: str, expected: float) -> None:
    assert score(answer, wanted) == pytest.approx(expected)


def test_a_longer_prompt_loses_its_middle_if_the_user_says_so(material: Material, tmp_path: Path) -> None:
    path = written(tmp_path / "long.jsonl", own(prompt=SEA * 8))
    with pytest.raises(
        ValueError, match=r"long.jsonl line 1 with 32 new tokens takes [\d,]+ positions, but the model has"
    ):
        task(material, path)
    found = task(material, path, most_tokens=200)
    item, whole = found.item(found.cases[0]), material.ids(SEA * 8)
    kept = len(item.context)
    assert kept + len(item.question) == 200
    assert item.context == whole[: kept - kept // 2] + whole[-(kept // 2) :]
    with pytest.raises(ValueError, match="line 1 has a question of .* tokens, for which most_tokens=4 has no room"):
        task(material, path, most_tokens=4)


def test_the_answer_is_generated_and_its_best_score_counts(
    runtime: Runtime, material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's part is played. Both protocols, and a question that is the prompt's end."""
    generate = Conversation.generate

    def played(self: Conversation, *args: Any) -> Any:
        decoded = generate(self, *args)
        decoded.rows[0].new_ids = material.ids(" cold ice\nand more")
        return decoded

    monkeypatch.setattr(Conversation, "generate", played)
    path = written(tmp_path / "own.jsonl", own(metric="exact_match"), {**own(metric="exact_match"), "question": ""})
    for question in Question:
        found = task(material, path, question=question, new_tokens=4)
        for case in found.cases:
            full, snapkv = (
                outcome
                for _, outcome in found.run_all(
                    runtime, contenders(["full", {"name": "snapkv", "window": 4}], [0.5]), case
                )
            )
            assert full.score == snapkv.score == 1.0  # "the cold ice", without the article and the next line
            assert full.details["nll"] > 0


def test_perplexity_is_that_of_the_first_answer_over_all_tokens(
    runtime: Runtime, material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Conversation, "generate", lambda *_: pytest.fail("nothing is to be generated"))
    path = written(tmp_path / "own.jsonl", own(), own(answers=["captain of the ship"]))
    found = task(material, path, metric=Score.perplexity)
    [full] = contenders(["full"], [])
    outcomes = [found.run(runtime, full, case) for case in found.cases]
    nlls = [outcome.details["nll"] for outcome in outcomes]
    weights = [len(material.ids(text)) for text in (" ice", " captain of the ship")]
    assert [outcome.weight for outcome in outcomes] == weights
    mean = sum(nll * weight for nll, weight in zip(nlls, weights, strict=True)) / sum(weights)
    combined = found.metric.combine([outcome.score for outcome in outcomes], [outcome.weight for outcome in outcomes])
    assert combined == pytest.approx(2.718281828459045**mean) and found.metric.lower_is_better


def test_two_files_are_evaluated_with_paired_differences_and_a_picture(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line that was changed is measured again, and no other."""
    questions = [own(answers=[word]) for word in ("ice", "sea", "ship", "world", "letter")]
    first = written(tmp_path / "first.jsonl", *questions)
    second = written(tmp_path / "second.jsonl", own(metric="perplexity"))
    options = ["model=hf", f"model.path={folder}", "ranks.device=cpu", "ranks.threads=1", "budgets=[0.5,0.25]"]
    options += [f"tasks=[{{name:file,path:{first},new_tokens:2}},{{name:file,path:{second}}}]"]
    options += ["policies=[full,{name:snapkv,window:4}]", f"report={tmp_path / 'eval.json'}"]
    assert main(options) == 0
    out = capfd.readouterr().out
    assert f"file {first}\n" in out and f"file {second}\n" in out and "over full" in out
    report = json.loads((tmp_path / "eval.json").read_text())
    assert [(row["metric"], row["measurements"]) for row in report["results"]] == [("contained", 5)] * 3 + [
        ("perplexity", 1)
    ] * 3
    of_full, *thinned = report["results"]
    assert of_full["over_full"] is None and all(row["over_full"]["interval"] for row in thinned[:2])
    assert (tmp_path / "eval_quality.png").is_file() and (tmp_path / "eval_pyramid.png").is_file()
    lines = tmp_path / "eval.jsonl"
    before = lines.read_text()
    written(tmp_path / "first.jsonl", own(answers=["snow"]), *questions[1:])
    assert main(options) == 0
    again = [json.loads(line) for line in lines.read_text().removeprefix(before).splitlines()]
    assert [(line["case"]["line"], line["policy"]) for line in again] == [
        (1, policy) for policy in ("full", "snapkv(window=4)", "snapkv(window=4)")
    ]
    assert len(summary.read(lines)) == 21
    mixed = [line for line in summary.read(lines) if line["policy"] == "full"]
    mixed = [*mixed[::-1], *(line for line in summary.read(lines) if line["policy"] != "full")]
    tasks = [task for task, _ in groupby(row.task for row in summary.rows(mixed))]
    assert sorted(tasks) == [f"file {first}", f"file {second}"]  # together, in whatever order lines are


@pytest.mark.parametrize("metric", [["found"], {"name": "found"}, None, "bleu"])
def test_a_line_of_an_unknown_metric_is_damaged(metric: object, tmp_path: Path) -> None:
    known = machine.ROOT / "benchmarks" / "results" / "evaluation.jsonl"
    line = json.loads(known.read_text().splitlines()[0])
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(line | {"metric": metric}) + "\n")
    with pytest.raises(ValueError, match="line 1 is a damaged measurement, see its metric; remove it"):
        summary.read(path)


BROKEN = [
    ("[1, 2]", r'is no object with {"prompt": text, "question": text, "answers": \[text, ...\]}, nor LongBench'),
    ("{", "is not JSON: Expecting property name"),
    (own(prompt=" \n"), "has an empty prompt"),
    (own(prompt=3), "prompt=3 must be text"),
    (own(answers=[]), r"answers=\[\] must be a text or a list of texts, none empty"),
    (own(answers=["ice", ""]), r'answers=\["ice", ""\] must be'),
    ({"prompt": SEA, "question": "What?"}, "answers=null must be"),
    ({"context": SEA, "question": "What?", "answers": "ice", "metric": "f1"}, r'is no object with {"prompt": text, '),
    (
        own(metrics="f1"),
        "line 2 has metrics, which is not one of prompt, question, answers, metric; did you mean metric",
    ),
    (
        {"prompt": SEA, "input": "What?", "answers": "ice"},
        "has input, which is not one of prompt, question, answers, m",
    ),
    (own(context=SEA, input="What?"), "has context and input, as LongBench's lines have, and prompt, which those have"),
    (
        LONGBENCH | {"metric": "f1"},
        "has context and input, as LongBench's lines have, and metric, which those have not",
    ),
    (own(metric="bleu"), "metric=bleu is not one of exact_match, contained, f1, perplexity"),
    (own(metric="f1"), r"line 2 has f1 and .* line 1 has no metric; give all lines the same, or use a file for each"),
]


@pytest.mark.parametrize(("line", "says"), BROKEN, ids=str)
def test_a_mistake_names_file_and_line(line: Any, says: str, material: Material, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(own()) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(ValueError, match=says) as caught:
        task(material, str(path))
    assert f"tasks path={path} line 2" in str(caught.value) and "\n" not in str(caught.value)


def test_a_data_set_with_another_score_asks_for_one(material: Material, tmp_path: Path) -> None:
    path = written(tmp_path / "reports.jsonl", LONGBENCH | {"dataset": "gov_report"})
    with pytest.raises(ValueError, match="line 1 is of LongBench's gov_report, which is not scored by F1; give tasks="):
        task(material, path)
    unnamed = written(tmp_path / "unnamed.jsonl", {key: LONGBENCH[key] for key in ("context", "input", "answers")})
    with pytest.raises(ValueError, match="line 1 has no dataset, which would say its score; give tasks="):
        task(material, unnamed)
    assert task(material, path, metric=Score.perplexity).metric.name == "perplexity"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("tasks=file", "tasks has file without a path; give {name:file,path:<jsonl>}"),
        (
            "tasks=[{name:file,path:a.jsonl,metric:bleu}]",
            "tasks.metric=bleu is not one of exact_match, contained, f1, ",
        ),
        ("tasks=[{name:file,path:a.jsonl,length:3}]", "unknown option tasks.length; did you mean tasks."),
        ("tasks=[{name:file,path:a.jsonl,samples:0}]", "tasks.samples=0 must be at least 1"),
        (
            "tasks=[{name:copy,samples:3}]",
            "tasks has {'name': 'copy', 'samples': 3}; options of copy are copy.samples=",
        ),
        ("tasks=[{name:file,path:a.jsonl},{name:file,path:a.jsonl}]", "tasks=[file a.jsonl,file a.jsonl] must name"),
    ],
)
def test_a_wrong_entry_is_one_sentence(option: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(says)


QUESTIONS = "tasks.path=mine.jsonl, which this run reads; give another file with"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["report=mine.json"], f"lines=mine.jsonl would overwrite {QUESTIONS} lines="),
        (["report=mine.jsonl", "lines=l.jsonl"], f"report=mine.jsonl would overwrite {QUESTIONS} report="),
        (["report=again.json"], f"lines=again.jsonl would overwrite {QUESTIONS} lines="),
        (["lines=my.py"], "lines=my.py would overwrite policies.path=my.py, which this run reads; give another file"),
        (
            ["tasks=[{name:file,path:e_quality.png}]", "report=e.json"],
            "e_quality.png, which report=e.json writes beside it, would overwrite tasks.path=e_quality.png, which",
        ),
        (["report=e.json", "lines=e_pyramid.png"], "report=e.json and lines=e_pyramid.png would overwrite each other"),
        (["report=e.json", "lines=./e.json"], "report=e.json and lines=./e.json would overwrite each other"),
    ],
)
def test_no_output_is_a_file_that_the_run_reads(
    options: list[str],
    says: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It may have any name, and need not exist yet. Nothing is written."""
    monkeypatch.chdir(tmp_path)
    Path("again.jsonl").symlink_to(written(tmp_path / "mine.jsonl", own()))
    Path("my.py").write_text("")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    given = [f"model.path={folder}", "model=hf", "ranks.device=cpu", "tasks=[{name:file,path:mine.jsonl}]"]
    assert exit_status(main, [*given, "policies=[full,{name:file,path:my.py}]", *options]) == 2
    assert one_line_error(capfd).startswith(says)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_cache_that_answers_nothing_right_is_told(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The full cache is measured though policies= lacks it, and the legend says what the two questions cannot tell."""
    questions = written(tmp_path / "hard.jsonl", *(own(answers=["no such word"]) for _ in range(2)))
    options = ["model=hf", f"model.path={folder}", "ranks.device=cpu", "ranks.threads=1", "budgets=[0.5]"]
    options += [f"tasks=[{{name:file,path:{questions},new_tokens:2}}]", "policies=[{name:snapkv,window:4}]"]
    assert main([*options, f"report={tmp_path / 'eval.json'}"]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[-3:] == [
        "full was added to policies=, since over full compares with it",
        "over full has no 95% interval where it is of fewer than 5 cases",
        f"file {questions}: the full cache itself scores 0, so differences to it say nothing; see its answers in "
        f"{tmp_path / 'eval.jsonl'}",
    ]
    assert "measurement 1 of 4: " in err
    report = json.loads((tmp_path / "eval.json").read_text())
    assert [row["policy"] for row in report["results"]] == ["full", "snapkv(window=4)"]
    assert [line["details"]["answers"] for line in summary.read(tmp_path / "eval.jsonl")] == [["no such word"]] * 4


def test_a_missing_file_is_told_before_the_model_is_loaded(material: Material, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tasks path=.*none.jsonl does not exist; check the path"):
        task(material, str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="empty.jsonl is empty; give a question per line"):
        task(material, str(tmp_path / "empty.jsonl"))
