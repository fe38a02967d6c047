"""The study of quality: what it measures and goes on from, its pairs with the full cache, and its tables."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evaluation.contenders import contenders
from benchmarks.evaluation.difference import Difference
from benchmarks.evaluation.plan import Plan, model_options
from benchmarks.evaluation.tasks.base import KVUse, Outcome
from benchmarks.harness import machine
from benchmarks.harness.lines import Line
from benchmarks.studies.quality import losses
from benchmarks.studies.quality.__main__ import STUDY
from benchmarks.studies.quality.losses import compared
from benchmarks.studies.quality.methods import DROPPING, RETRIEVING, Method, override
from benchmarks.studies.quality.paired import rows, settings
from benchmarks.studies.quality.pictures import picture
from benchmarks.studies.quality.recall_picture import recall_picture
from benchmarks.studies.quality.tables import tables
from launch.evaluate import EVALUATE
from policies.duo_table import GATES, DuoTable
from policies.head_scores import HeadScores
from policies.score_maps import ScoreMaps
from runahead import Model, ModelOptions, Ranks
from tests.families import build
from tests.tokenizers_for_tests import byte_level


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights and a tokenizer of bytes."""
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_level()
    build("llama", dtype=torch.float32, vocab_size=len(tokenizer), eos_token_id=None).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def line(policy: str, sample: int, score: float, *, budget: float | None = None, **more: Any) -> Line:
    return {
        "task": "ruler",
        "policy": policy,
        "policy_settings": {},
        "budget": budget,
        "case": {"kind": more.get("kind", "vt"), "length": more.get("length", 1024), "sample": sample},
        "score": score,
        "seen_share": more.get("seen_share", 1.0),
        "kv_bytes": 50,
        "host_bytes": more.get("host_bytes", 0),
        "full_kv_bytes": 100,
        "details": {"nll": 1.0 - score},
        "ttft_s": 1.0,
        "tpot_s": None,
        "model": "m",
        "commit": "abc",
        "date": more.get("date", "2026-11-25T10:00:00Z"),
        "task_settings": {"question": more.get("question", "separate")},
    }


def test_scores_are_compared_question_by_question() -> None:
    found = [line("full", sample, 1.0) for sample in range(8)]
    found += [line("snapkv", sample, float(sample % 2), budget=0.5, seen_share=0.5) for sample in range(10)]
    [(setting, group)] = settings(found).items()
    assert setting == ("m", "separate", "1,024 tokens")
    full, snapkv = rows(group)
    assert (full.name, full.score.mean, full.pairs) == ("full", 0.0, 8)
    assert (snapkv.pairs, snapkv.scores, snapkv.kept_share, snapkv.seen_share) == (8, {"vt": 0.5}, 0.5, 0.5)
    assert snapkv.score.mean == -0.5 and snapkv.loss.mean == 0.5
    assert snapkv.score.interval is not None
    low, high = snapkv.score.interval
    assert -0.9 < low < -0.5 < high < -0.1


def test_times_of_different_runs_are_not_compared() -> None:
    """They may be of different machines."""
    found = [line("full", sample, 1.0) for sample in range(3)]
    found += [line("snapkv", sample, 1.0) | {"ttft_s": 1.5} for sample in range(2)]
    found += [line("snapkv", 2, 1.0, date="later") | {"ttft_s": 9.0}, line("tova", 0, 1.0, date="later")]
    _, snapkv, tova = rows(found)
    assert (snapkv.ttft, tova.ttft) == (1.5, None) and (snapkv.pairs, tova.pairs) == (3, 1)


def test_the_newest_line_of_a_question_counts_and_settings_stay_apart() -> None:
    found = [line("full", 0, 0.0), line("full", 0, 1.0), line("full", 0, 0.5, question="with_context")]
    found += [line("full", 0, 0.25, length=2048)]
    groups = settings(found)
    assert [[each["score"] for each in group] for group in groups.values()] == [[1.0], [0.5], [0.25]]


def test_methods_without_a_budget_have_their_names_and_shares_in_tables_of_ruler() -> None:
    """A file of a model may have any name. Lists of keys alone are in the tables of losses."""
    [quest] = [method for method in RETRIEVING if method.name == "quest"]
    found = [line("full", 0, 1.0), *(line(str(each), 0, 1.0) | {"policy_settings": each} for each in quest.entries)]
    [group] = settings(found).values()
    assert [row.name for row in rows(group)] == ["full", "quest, 2%", "quest, 5%", "quest, 10%"]
    [duo] = [method for method in DROPPING if method.name == "duo_attention"]
    entries = [entry | {"heads": "gates-of-the-model"} for entry in (*duo.entries, duo.entries[0] | {"recent": 7})]
    gated = [line(str(entry), 0, 1.0) | {"policy_settings": entry} for entry in entries]
    named = [row.name for row in rows([*gated, line("full", 0, 1.0)])]
    assert named == ["full", "duo_attention, 12.5%", "duo_attention, 25%", "duo_attention, 50%", str(entries[-1])]
    of_keys = [each | {"task": "key_value", "details": {"nll": 1.0, "pairs": 8}} for each in found]
    assert settings(of_keys) == {}


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    """Intervals of 95 in 100 samples of 40 fair coins have 0.5 in them; the bootstrap's are a little too narrow."""
    draw = random.Random(1)
    covered = 0
    for _ in range(100):
        low, high = Difference.with_interval([float(draw.random() < 0.5) for _ in range(40)]).interval or (1.0, 0.0)
        covered += low <= 0.5 <= high
    assert 88 <= covered <= 99
    assert Difference.with_interval([1.0] * 4).interval is None
    assert Difference.with_interval([1.0] * 5).interval == (1.0, 1.0)


def test_a_table_says_what_is_kept_in_host_memory_and_what_attention_saw() -> None:
    found = [line("full", 0, 1.0), line("quest", 0, 1.0, seen_share=0.11, host_bytes=100)]
    found += [line("full", 0, 0.5, kind="qa_1"), line("snapkv", 0, 0.5, budget=0.2, kind="qa_1", seen_share=0.2)]
    found[-1]["ttft_s"] = 2.5
    text = tables(found)
    assert "**m, question not seen, 1,024 tokens**: 2 questions, 2026-11-25, commit abc" in text
    assert "| policy | budget | kept | saw | vt | qa_1 | score over full | loss over full | prompt | n |" in text
    assert "| `quest` | - | 150% | 11% | 100% | - | +0 | +0.00 | 1.0 x | 1 |" in text
    assert "| `snapkv` | 20% | 50% | 20% | - | 50% | +0 | +0.00 | 2.5 x | 1 |" in text


def test_sets_have_a_score_and_no_loss() -> None:
    found = [line("full", 0, 1.0), line("snapkv", 0, 0.5, budget=0.2)]
    sets = [line("full", 0, 0.5, kind="cwe"), line("snapkv", 0, 0.5, budget=0.2, kind="cwe")]
    sets = [each | {"details": {"nll": None}} for each in sets]
    assert "| 50% | 50% | -25 | +0.50 | 1.0 x | 2 |" in tables([*found, *sets])
    text = tables(sets)  # nothing but sets
    assert "| 50% | +0 | - | 1.0 x | 1 |" in text and picture(sets) is not None


def test_a_policy_that_wraps_a_scorer_is_compared_with_the_scorers_own_choice_too() -> None:
    """The same questions and the same budget count: of `snapkv` there are more of both."""
    found = []
    for sample, (full, alone, shared_out) in enumerate([(1.0, 0.5, 0.75), (1.0, 0.0, 0.0), (1.0, 1.0, None)]):
        found.append(line("full", sample, full))
        for budget, score in ((0.5, alone), (0.25, 0.0)):
            snapkv = {"name": "snapkv", "budget": budget}
            found.append(line("snapkv", sample, score, budget=budget) | {"policy_settings": snapkv})
        if shared_out is not None:
            wrapped = {"name": "adakv", "scorer": {"name": "snapkv", "budget": 0.5}}
            found.append(line("adakv(scorer=snapkv)", sample, shared_out, budget=0.5) | {"policy_settings": wrapped})
    text = tables(found)
    assert "| policy | budget | score over its scorer | loss over its scorer | n |" in text
    assert "| `adakv(scorer=snapkv)` | 50% | +12 | -0.12 | 2 |" in text
    assert "over its scorer" not in tables([each for each in found if each["policy"] != "snapkv"])


def test_the_study_measures_goes_on_and_writes_its_page(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "quality.md"
    page.write_text("Before.\n<!-- the table begins -->\nold\n<!-- the table ends -->\nAfter.\n")
    lines = tmp_path / "quality.jsonl"
    options = ["--model", str(tiny_model), "--tasks", "niah_single_1", "key_value", "--policies", "snapkv"]
    options += ["{name:quest,fetch:0.3,page:4}", "--budgets", "0.4", "--lengths", "480", "--samples", "2"]
    options += ["--new-tokens", "0", "--pairs", "2", "--device", "cpu", "--lines", str(lines)]
    options += ["--out", str(tmp_path)]
    STUDY.main(options)
    found = [json.loads(text) for text in lines.read_text().splitlines()]
    assert [(each["task"], each["policy"]) for each in found] == [
        (task, policy)
        for _ in range(2)
        for task in ("ruler", "key_value")
        for policy in ("full", "snapkv", "quest(fetch=0.3, page=4)")
    ]
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "old" not in text
    assert "480 tokens**: 2 questions" in text and "2 keys**: 2 questions" in text
    kept = [each for each in found if (each["task"], each["case"]["sample"]) != ("ruler", 1)]
    lines.write_text("".join(json.dumps(each) + "\n" for each in kept))
    monkeypatch.setattr(machine, "hardware", lambda: {"cpu": "another"})
    STUDY.main(options)  # goes on after an interruption, on another machine too
    again = [json.loads(text) for text in lines.read_text().splitlines()]
    assert again[: len(kept)] == kept and [each["key"] for each in again[len(kept) :]] == [
        each["key"] for each in found if each not in kept
    ]
    monkeypatch.setattr(Model, "load", lambda *_, **__: pytest.fail("nothing was missing"))
    STUDY.main(options)
    assert len(lines.read_text().splitlines()) == len(found)
    capfd.readouterr()


def test_an_option_of_the_model_that_came_later_does_not_make_lines_worthless() -> None:
    """The lines of the repository are those of models without it."""

    @dataclass(kw_only=True)
    class Later(ModelOptions):
        overrides: dict[str, Any] = field(default_factory=dict)

    with (machine.ROOT / "benchmarks" / "results" / "quality.jsonl").open() as file:
        known = json.loads(file.readline())["model_options"]
    assert model_options(ModelOptions()) == model_options(Later()) == known
    assert model_options(Later(overrides={"a": 1})) == known[:-1] + ", overrides={'a': 1})"


def test_a_mistake_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--model", str(tiny_model), "--lines", str(tmp_path / "q.jsonl"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="ruler.tasks has qa_1, which needs ruler.squad=<dev-v2.0.json"):
        STUDY.main([*options, "--tasks", "qa_1"])


def test_files_of_a_model_are_known_by_their_content(tiny_model: Path, tmp_path: Path) -> None:
    """A line is missing, and of another row, where a policy read another file of the same name."""
    entry = f"{{name:duo_attention,heads:{tmp_path},sinks:4,recent:8}}"
    task = ["tasks=[ruler]", "ruler.tasks=[niah_single_1]", "ruler.lengths=[480]", "ruler.samples=2"]
    model_options = ["model=hf", f"model.path={tiny_model}", "ranks.device=cpu"]
    run = EVALUATE.compose([f"policies=[full,{entry}]", *task, "ruler.new_tokens=8", *model_options])
    ranks = Ranks.start(run.ranks)
    model = Model.load(run.model, ranks.device)
    use = KVUse(kv_bytes=50, full_kv_bytes=100, num_tokens=480, kept_tokens=[240])
    outcome = Outcome(score=1.0, seen_share=1.0, kv=use, ttft_s=1.0, tpot_s=None, details={"nll": 0.0})

    def measured(gates: str, done: list[Line]) -> list[Line]:
        (tmp_path / GATES).write_text(gates)
        plan = replace(Plan.from_options(run, ranks), done=done)
        return [plan.line(*step, outcome, model) for step in plan.missing()]

    first = measured("0.5\t0.5\n", [])
    assert len(first) == 4 and measured("0.5\t0.5\n", first) == []
    again = measured("0.5\t0.6\n", first)
    assert [line["case"] for line in again] == [line["case"] for line in first if line["policy"] != "full"]
    [group] = settings([*first, again[0]]).values()
    assert group == [first[0], again[0], first[2]]
    older = {name: value for name, value in first[0].items() if name != "policy_files"}  # from before these were told
    [group] = settings([older, *first[1:]]).values()
    assert group == [older, *first[1:]]


def loss_line(task: str, settings: dict[str, Any], sample: int, nll: float, **more: Any) -> Line:
    pairs = {"pairs": 28} if task == "key_value" else {}
    return {
        **line(settings["name"], sample, 0.0),
        "task": task,
        "case": {"sample": sample, **pairs},
        "details": {"nll": nll, "following_nll": 2 * nll, **pairs} | more,
        "policy_settings": settings,
        "task_settings": {"question": "separate"},
        "num_tokens": 2048,
        "text": "t",
        "kv_bytes": 25,
    }


def test_losses_are_those_over_the_full_caches_on_the_same_samples() -> None:
    """A mean over all samples of each would be 1.5 and not 2.0 for `snapkv`, which lacks the sample of 5.0."""
    keeps_half = DROPPING[2].entries[0]
    assert keeps_half == {"name": "snapkv", "budget": 0.5}
    found = [loss_line("copy", {"name": "full"}, sample, nll) for sample, nll in enumerate([1.0, 2.0, 5.0])]
    found += [loss_line("copy", keeps_half, sample, nll) for sample, nll in enumerate([2.0, 5.0])]
    found += [loss_line("key_value", {"name": "full"}, 0, 1.0), loss_line("key_value", keeps_half, 0, 4.0)]
    longer = [one | {"num_tokens": num} for one, num in zip(found[:1] + found[3:4], (2900, 2870), strict=True)]
    assert losses.settings([*found, *longer], "dropping") == [found, longer]
    [(method, [half, quarter, eighth])] = compared(found, "dropping").items()
    assert (method.name, quarter, eighth) == ("snapkv", None, None) and half is not None
    assert [each.mean for each in half.losses.values()] == [2.0, 4.0, 3.0]
    assert (half.samples["copy"], half.kept_share) == (2, 0.25) and half.losses["copy"].interval is None
    assert "`snapkv` | 25 / - / - | +2.00 | - | - | +4.00 | - | - | +3.00 | - | - | 2 + 1 |" in tables(found)
    assert settings(found) == {} and losses.settings(found, "retrieving") == []


def test_the_recall_of_what_retrieves_is_drawn_over_what_attention_saw() -> None:
    entries = [entry for method in RETRIEVING for entry in method.entries]
    found = [loss_line("copy", {"name": "full"}, 0, 1.0)]
    found += [
        loss_line("copy", entry, 0, 1.5, hit_mass=0.5) | {"seen_share": entry["fetch"], "kv_bytes": 110}
        for entry in entries
    ]
    assert (recall_picture(found) or b"").startswith(b"\x89PNG") and recall_picture(found[:1]) is None
    assert "`exact_topk` | 10% | 10 / 5 / 2 | 50 / 50 / 50 | +0.50 | +0.50 | +0.50 |" in tables(found)


@pytest.fixture
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that entries name are of a model, and are not read."""
    monkeypatch.setattr("benchmarks.evaluation.contenders.digest_of_path", str)
    for kind in (DuoTable, HeadScores, ScoreMaps):
        monkeypatch.setattr(kind, "load", lambda *_: DuoTable(gates=[]))


@pytest.mark.usefixtures("without_files")
@pytest.mark.parametrize("method", [*DROPPING, *RETRIEVING], ids=lambda method: method.name)
def test_no_option_of_a_method_is_refused(method: Method) -> None:
    assert [each.settings for each in contenders(method.entries, [])] == list(method.entries)


@pytest.mark.usefixtures("without_files")
@pytest.mark.parametrize("method", [*DROPPING, *RETRIEVING], ids=lambda method: method.name)
@pytest.mark.sampled(3)
def test_a_method_is_an_entry_of_policies(method: Method) -> None:
    run = EVALUATE.compose([f"policies=[{','.join(map(override, method.entries))}]", "budgets=[]"])
    assert run.policies == list(method.entries)
