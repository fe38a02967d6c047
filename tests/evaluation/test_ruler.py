"""RULER's tasks: the answer is in the context exactly as it is defined, at any length and the same for a seed."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluation.material import Material
from benchmarks.evaluation.options import RULER_TASKS, EvaluateRun, RulerOptions
from benchmarks.evaluation.tasks.answering import Item
from benchmarks.evaluation.tasks.ruler import NEW_TOKENS
from benchmarks.evaluation.tasks.ruler.task import Ruler

LENGTHS = [2400, 3800]
"""Lengths in tokens of a tokenizer with hardly more than a token per letter."""
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NEEDLE = re.compile(r"A secret (?:number|code) of (\S+) is (\S+)\.")
Asked = tuple[dict[str, Any], Item, str]
"""A case, its question, and the context as text."""
VALUES = {"niah_single_3": UUID, "niah_multikey_3": UUID}
NUMBER = r"\d{7}"


@pytest.fixture(scope="module")
def material(material: Material) -> Material:  # type: ignore[misc]
    """A text of many words."""
    words = [f"{first}{vowel}{last}ing" for first in "bcdfghjklm" for vowel in "aeiou" for last in "lmnprstv"]
    sentences = [f"The {one} and the {other} of {at}." for at, (one, other) in enumerate(pairwise(words))]
    assert material.text is not None
    return replace(material, text=replace(material.text, content=" ".join(sentences)), max_positions=None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small files in the form of SQuAD's and HotpotQA's."""
    folder = tmp_path_factory.mktemp("questions")
    paragraphs = [
        {
            "context": f"Town {at} lies {at} miles from the sea.",
            "qas": [
                {
                    "question": f"How far is town {at}?",
                    "answers": [{"text": f"{at} miles"}, {"text": f"{at} miles from the sea"}],
                    "is_impossible": False,
                },
                {"question": "Who lives there?", "answers": [], "is_impossible": True},
            ],
        }
        for at in range(100, 220)
    ]
    squad = {
        "data": [{"title": "Towns", "paragraphs": paragraphs[:20]}, {"title": "More", "paragraphs": paragraphs[20:]}]
    }
    titles = [f"Island {at}" for at in range(300, 420)]
    hotpot = [
        {
            "question": f"Which is larger, {titles[at]} or {titles[at + 1]}?",
            "answer": titles[at],
            "supporting_facts": [[titles[at], 0], [titles[at + 1], 0]],
            "context": [[title, [f"{title} is", " small."]] for title in titles[at : at + 10]],
        }
        for at in range(0, 110)
    ]
    for name, data in (("squad", squad), ("hotpotqa", hotpot)):
        (folder / f"{name}.json").write_text(json.dumps(data))
    return {name: str(folder / f"{name}.json") for name in ("squad", "hotpotqa")}


def ruler(material: Material, **options: Any) -> Ruler:
    return Ruler(EvaluateRun(ruler=RulerOptions(**{"lengths": LENGTHS} | options)), material)


def items(task: Ruler) -> list[Asked]:
    decode = task.material.tokenizer.decode
    return [(case, item, decode(item.context)) for case in task.cases for item in [task.item(case)]]


@pytest.fixture(scope="module")
def everything(material: Material, files: dict[str, str]) -> Ruler:
    return ruler(material, tasks=list(RULER_TASKS), samples=1, **files)


@pytest.fixture(scope="module")
def asked(everything: Ruler) -> list[Asked]:
    return items(everything)


def test_all_thirteen_take_turns_and_are_as_long_as_there_is_room(everything: Ruler, asked: list[Asked]) -> None:
    assert [case["kind"] for case in everything.cases] == [*RULER_TASKS, *RULER_TASKS]
    for case, item, context in asked:
        num_tokens = len(item.context) + len(item.question)
        sentence = 120  # the largest unit, a line of noise
        assert case["length"] - sentence <= num_tokens <= case["length"], case
        assert item.new_tokens == NEW_TOKENS.get(case["kind"], 128)
        question = everything.material.tokenizer.decode(item.question)
        assert question not in context or case["kind"] == "cwe", case  # the solved example has the same question


def test_answers_that_are_sets_are_generated_as_published_and_scored_in_any_order(material: Material) -> None:
    """Other tasks may generate nothing meanwhile; a case says so, which lines with another score do not."""
    tasks = ["niah_single_1", "niah_multivalue", "niah_multiquery", "cwe", "fwe"]
    task = ruler(material, tasks=tasks, samples=1, lengths=[2400], new_tokens=0)
    single, *sets = items(task)
    assert (single[1].new_tokens, "new_tokens" in single[0]) == (0, False) and single[1].reference is not None
    assert (
        [item.new_tokens for _, item, _ in sets] == [case["new_tokens"] for case, _, _ in sets] == [128, 128, 120, 50]
    )
    for _, item, _ in sets:
        assert item.reference is None and task.reference_ids(item) == []
        assert task.score(" and ".join(reversed(item.answers)).upper(), item) == 1.0
        assert task.score(item.answers[-1], item) == 1 / len(item.answers)
    few = ruler(material, tasks=tasks, samples=1, lengths=[2400], new_tokens=9)
    assert [item.new_tokens for _, item, _ in items(few)] == [9] * 5


def test_a_seed_makes_the_same_questions_and_samples_differ(material: Material) -> None:
    tasks = ["niah_multikey_2", "vt", "fwe"]
    first, again = (items(ruler(material, tasks=tasks, samples=2, lengths=[2400])) for _ in range(2))
    assert first == again and len({context for _, _, context in first}) == len(first) == 6
    assert len({tuple(item.answers) for _, item, _ in first}) == 6


@pytest.mark.parametrize("kind", [name for name in RULER_TASKS if name.startswith("niah")])
def test_the_needles_of_the_question_are_in_the_context_once_each(kind: str, material: Material) -> None:
    task = ruler(material, tasks=[kind], samples=3)
    value = VALUES.get(kind, NUMBER)
    several_keys, several_values = kind == "niah_multiquery", kind == "niah_multivalue"
    for _, item, context in items(task):
        found = NEEDLE.findall(context)
        question = material.tokenizer.decode(item.question)
        asked = [key for key in dict.fromkeys(key for key, _ in found) if key in question]
        assert len(asked) == (4 if several_keys else 1)
        assert len(item.answers) == (4 if several_keys or several_values else 1)
        assert sorted(each for key, each in found if key in asked) == sorted(item.answers)
        assert all(re.fullmatch(value, each) for _, each in found)
        assert all(context.count(answer) == 1 for answer in item.answers)
        if several_keys or several_values:
            assert item.reference is None  # several orders are right
        else:
            assert item.answers[0] in item.reference
        keys = {key for key, _ in found}
        if kind in ("niah_multikey_2", "niah_multikey_3"):  # nothing but needles
            assert (
                len(keys) > 8
                and NEEDLE.sub("", context).split() == NEEDLE.sub("", context[: context.index("A secr")]).split()
            )
        else:
            assert len(keys) == (4 if kind in ("niah_multikey_1", "niah_multiquery") else 1)
        assert ("The grass is green." in context) == (kind == "niah_single_1")
        if kind == "niah_multikey_3":
            assert all(re.fullmatch(UUID, key) for key in keys)


def test_variables_are_those_that_a_chain_of_assignments_gives_the_value(material: Material) -> None:
    for _, item, context in items(ruler(material, tasks=["vt"], samples=3)):
        solved, _, text = context.rpartition("Variables are assigned")
        value = re.findall(r"have the value (\d{5})", material.tokenizer.decode(item.question))[0]
        known: dict[str, str] = {}
        for name, given in re.findall(r"^VAR ([A-Z]+) = (?:VAR )?(\S+)$", text, re.MULTILINE):
            known[name] = known.get(given, given)
        assert [name for name, each in known.items() if each == value] == item.answers and len(item.answers) == 5
        assert item.reference.split() == item.answers and all(len(name) == 5 for name in item.answers)
        assert "Variables are assigned" in solved and "Question" not in text


@pytest.mark.parametrize(("length", "times"), [(2400, {6, 1}), (9000, {30, 3})])
def test_the_ten_most_common_words_are_asked_for(length: int, times: set[int], material: Material) -> None:
    [(_, item, context)] = items(ruler(material, tasks=["cwe"], samples=1, lengths=[length]))
    listed = re.findall(r"\d+\. (\w+)", context.rpartition("\n")[2])
    counts = Counter(listed)
    assert {word for word, _ in counts.most_common(10)} == set(item.answers) and len(item.answers) == 10
    assert set(counts.values()) == times
    assert [int(number) for number in re.findall(r"(\d+)\. \w", context.rpartition("\n")[2])] == [
        *range(1, len(listed) + 1)
    ]
    with pytest.raises(
        ValueError, match=r"sea.txt has 400 different words, too few for cwe with 90,000 tokens; give a"
    ):
        ruler(material, tasks=["cwe"], lengths=[90000])


def test_the_three_most_frequent_coded_words_are_asked_for(material: Material) -> None:
    for case, item, context in items(ruler(material, tasks=["fwe"], samples=3)):
        counts = Counter(context.rpartition("\n")[2].split())
        (noise, _), *words = counts.most_common()
        assert noise == "..." and [word for word, _ in words[:3]] == item.answers
        assert words[2][1] > words[3][1], case
        assert counts[noise] / counts[words[0][0]] == pytest.approx(4, rel=0.1)  # rank^-2


def test_documents_of_a_question_are_among_others_and_any_answer_is_right(
    everything: Ruler, asked: list[Asked]
) -> None:
    for case, item, context in asked:
        if case["kind"] not in ("qa_1", "qa_2"):
            continue
        question = everything.material.tokenizer.decode(item.question)
        if case["kind"] == "qa_1":
            [town] = re.findall(r"town (\d+)", question)
            assert f"Town {town} lies {item.answers[0]} from the sea." in context
            assert item.answers == [f"{town} miles", f"{town} miles from the sea"]
        else:
            assert all(f"{island}\n{island} is small." in context for island in re.findall(r"Island \d+", question))
            assert item.answers[0] in question
        documents = re.findall(r"^Document (\d+):$", context, re.MULTILINE)
        assert len(documents) > 10 and documents == [str(number) for number in range(1, len(documents) + 1)]
        assert everything.score(f"It is {item.answers[-1].upper()}.", item) == 1.0
        assert everything.score("I do not know", item) == 0.0


def test_scores_are_the_share_of_strings_in_an_answer(everything: Ruler, asked: list[Asked]) -> None:
    item = next(item for case, item, _ in asked if case["kind"] == "vt")
    assert everything.score(item.reference.lower(), item) == 1.0
    assert everything.score(" ".join(item.answers[1:3]), item) == 0.4
    assert everything.score("", item) == 0.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": ["qa_1"]}, r"ruler.tasks has qa_1, which needs ruler.squad=<dev-v2.0.json of SQuAD 2.0, from https"),
        ({"tasks": ["vt", "qa_2"]}, r"which needs ruler.hotpotqa=<hotpot_dev_distractor_v1.json of HotpotQA, from"),
        ({"tasks": ["qa_1"], "squad": "none.json"}, "ruler.squad=none.json does not exist; check the path"),
        ({"tasks": ["vt"], "lengths": [60]}, "ruler.lengths=60 has no room for a question of vt; use more tokens, or"),
    ],
)
def test_what_is_missing_is_told_before_the_model_is_loaded(
    options: dict[str, Any], says: str, material: Material
) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        ruler(material, **options)
    assert "\n" not in str(caught.value)


def test_a_file_of_other_questions_is_named(material: Material, files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not dev-v2.0.json of SQuAD 2.0, .*; give that file"):
        ruler(material, tasks=["qa_1"], squad=files["hotpotqa"])
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"is not hotpot_dev_distractor_v1.json of HotpotQA, .*; give that file"):
        ruler(material, tasks=["qa_2"], hotpotqa=str(broken))


def test_a_model_with_too_few_positions_is_told(material: Material) -> None:
    options = RulerOptions(tasks=["niah_single_1"], lengths=[500], new_tokens=40)
    with pytest.raises(ValueError, match="ruler.lengths=500 with 40 new tokens takes 540 positions, but the model has"):
        Ruler(EvaluateRun(ruler=options), replace(material, max_positions=512))
