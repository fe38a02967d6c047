"""A small selection of tests/faults/endurance.py, and that it would notice what it looks for."""

from __future__ import annotations

import json
import re

import pytest

from tests.families import save_tiny_config
from tests.faults.endurance import Prompts, Run, differing, endurance, grown, make_prompts, missing
from tests.tokenizers_for_tests import byte_level


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny_config(tmp_path_factory.mktemp("model"), byte_level())
    return ["model=random", f"model.config={folder}", "ranks.device=cpu", "ranks.threads=1"]


@pytest.mark.slow
def test_many_prompts_in_one_run(model: list[str]) -> None:
    line = endurance(seed=1, count=30, longest=400, num_fresh=1, overrides=[*model, "generation.max_new_tokens=2"])
    assert line["problems"] == []
    assert (line["answered"], line["skipped"]) == (25, 5)
    assert line["prompt_tokens"]["longest"] > 300 > 3 > line["prompt_tokens"]["shortest"]


def test_prompts_are_the_same_for_the_same_seed(model: list[str]) -> None:
    prompts = make_prompts(3, 100, 200, model)
    assert prompts == make_prompts(3, 100, 200, model)
    assert prompts != make_prompts(4, 100, 200, model)
    assert len(prompts.lines) == 100
    assert len(prompts.invalid) == 6
    lengths = [len(json.loads(line)) for place, line in enumerate(prompts.lines) if place not in prompts.invalid]
    assert min(lengths) == 1
    assert max(lengths[:20]) > 100


def whole_run(**changed: object) -> Run:
    entries = [{"index": 0, "text": "a", "new_token_ids": [1]}, {"index": 1, "error": "it is empty"}]
    fields = {"status": 0, "entries": entries, "errors": "", "seconds": 1.0}
    fields["report"] = {"prompts": [{"index": 0, "new_token_ids": [1]}]}
    return Run(**(fields | changed))


PROMPTS = Prompts(lines=['"a"', '""'], invalid={1: "is empty"})


def test_a_complete_run_has_no_problem() -> None:
    assert missing(whole_run(), PROMPTS) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"status": 1, "errors": "rank 1 failed"}, "status 1: rank 1 failed"),
        ({"entries": whole_run().entries[:1]}, r"led to lines \[0\]"),
        ({"entries": whole_run().entries[::-1]}, r"led to lines \[1, 0\]"),
        ({"entries": [{"index": place, "error": "is empty"} for place in range(2)]}, r"\[0, 1\] were skipped"),
        ({"entries": [whole_run().entries[0], {"index": 1, "error": "too long"}]}, "wrongly explained: too long"),
        ({"report": {}}, "the report and standard output differ"),
    ],
)
def test_what_is_lost_is_noticed(changed: dict[str, object], problem: str) -> None:
    assert any(re.search(problem, sentence) for sentence in missing(whole_run(**changed), PROMPTS))


def test_memory_that_grows_is_noticed() -> None:
    flat = [(lines, 500.0 + lines % 7) for lines in range(300)]
    leak = [(lines, 500.0 + 0.2 * lines) for lines in range(300)]
    assert grown(whole_run(memory_mib=[flat, flat]), 300) == []
    [problem] = grown(whole_run(memory_mib=[flat, leak]), 300)
    assert problem.startswith("rank 1 had 512 MiB at most, and 560 MiB later")
    assert grown(whole_run(memory_mib=[[]]), 300) == ["the memory of rank 0 was not seen"]


def test_another_answer_is_noticed() -> None:
    same = whole_run(entries=[{"index": 0, "text": "a", "new_token_ids": [1]}])
    other = whole_run(entries=[{"index": 0, "text": "b", "new_token_ids": [1]}])
    assert differing(whole_run(), 0, same) == []
    assert differing(whole_run(), 0, other) == ["prompt 0 has text a, and b in a run of its own"]
