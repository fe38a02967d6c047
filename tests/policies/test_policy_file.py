"""policy=file: a policy that a Python file outside the repository defines, on the command line and on several ranks."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import policies
from benchmarks.evaluation.contenders import contenders
from launch.evaluate import main as evaluate
from launch.infer import INFER, main
from launch.inputs.policies import policies_of, rank_policies
from launch.inputs.policy_file import load_files, policy_class
from policies.pyramidinfer import PyramidInfer
from runahead.failures import is_mistake, line_of
from runahead.ranks.ranks import Ranks
from tests.exit_status import exit_status, one_line_error
from tests.policies.test_retrieval import Turns
from tests.rank_pool import RankPool
from tests.ranks.tasks import tiny_model
from tests.ranks.test_infer import TEXT, model, options, our_lines, torchrun  # noqa: F401 (model is a fixture)

SOURCE = """
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from policies import LayerView, Scorer


class Which(Enum):
    even = "even"
    odd = "odd"


@dataclass(kw_only=True)
class EverySecond(Scorer):
    which: Which = Which.odd

    def score(self, view: LayerView):
        slots_n = view.k_BKnH.new_ones(len(view.pads), 1, view.num_slots).cumsum(dim=-1)
        return (slots_n % 2 == (self.which is Which.odd)) + slots_n * 1e-6
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "my policy.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path / "my policy.py"


def test_what_the_author_of_a_policy_imports_stays() -> None:
    """Files outside the repository import these names: a name that goes breaks them, wherever it is defined."""
    names = [
        "Budget",
        "Choice",
        "Index",
        "LayerForm",
        "LayerView",
        "ModelFacts",
        "Phase",
        "Policy",
        "PromptPart",
        "PromptView",
        "Replay",
        "Retriever",
        "Scorer",
        "Signals",
        "Slots",
        "TokenKind",
        "budget_tokens",
        "check_budget",
        "require",
        "require_least",
    ]
    found = {name: getattr(policies, name) for name in names}
    assert set(names) == set(policies.__all__) - {"POLICIES", "PolicyTable"}
    assert issubclass(found["Scorer"], found["Policy"]) and issubclass(found["Retriever"], found["Policy"])
    with pytest.raises(AttributeError, match="module 'policies' has no attribute 'Unheard'"):
        policies.Unheard  # noqa: B018


def made(*overrides: str) -> list[Any]:
    return rank_policies(INFER.compose(overrides).policy).last


def test_options_are_fields_of_its_dataclass(path: Path) -> None:
    [policy] = made("policy=file", f"policy.path={path}", "policy.options={budget:0.5,which:even}")
    assert type(policy) is policy_class(str(path))
    assert (policy.budget, policy.which.name, policy.evict_every) == (0.5, "even", 16)
    assert made("policy=file", f"policy.path={path}", "policy.options.budget=0.5")[0].budget == 0.5


def test_it_may_be_a_step_and_work_on_some_ranks(path: Path) -> None:
    step = {"name": "file", "path": str(path), "options": {"budget": 64}}
    first, second = policies_of({"name": "sequence", "steps": ["pyramidinfer", step]}, "policy")
    assert (first, second.budget) == (PyramidInfer(), 64)
    [policy] = made("policy=per_rank", f"policy.ranks.last={{name:file,path:'{path}',options:{{budget:32}}}}")
    assert policy.budget == 32


def test_it_is_compared_with_others(path: Path) -> None:
    found = contenders([{"name": "file", "path": str(path), "options": {"budget": 0.5}}, "window"], [0.5])
    assert [contender.policies.last[0].budget for contender in found] == [0.5, 0.5]


def test_it_is_sent_from_rank_to_rank(path: Path) -> None:
    [policy] = made("policy=file", f"policy.path={path}")
    assert pickle.loads(pickle.dumps(policy)) == policy


RETRIEVING = """
from dataclasses import dataclass

from policies import Index, Retriever


class Own(Index):
    def choose(self, q_BNH, slots):
        return None


@dataclass(kw_only=True)
class Base(Retriever):
    fetch: int | float | None = 32
    first: int = 2


@dataclass(kw_only=True)
class Mine(Base):
    index_class = Own
"""
OF_INDEX = RETRIEVING + "\n    def {}(self, index, *given):\n        return None\n"
OUT_OF_TWO = RETRIEVING.replace("    first: int", "    index_class = Own\n    first: int")


def test_a_base_of_retrievers_is_no_policy(path: Path) -> None:
    path.write_text(RETRIEVING, encoding="utf-8")
    [policy] = made("policy=file", f"policy.path={path}", "policy.options={first:3}")
    assert (type(policy).__name__, policy.first) == ("Mine", 3)


def test_an_index_without_its_facts_is_told(path: Path) -> None:
    path.write_text(RETRIEVING.replace("def choose(self, q_BNH, slots)", "def __init__(self, view, how)"))
    turns = Turns(tiny_model("llama"), made("policy=file", f"policy.path={path}", "policy.options={min_tokens:0}"))
    with pytest.raises(ValueError, match=r"^Own.__init__ must call super\(\).__init__\(view, how\)$"):
        turns.prefill()


TWO = SOURCE + "\n\n@dataclass(kw_only=True)\nclass Other(EverySecond):\n    pass\n"


@pytest.mark.parametrize(
    ("source", "overrides", "says"),
    [
        (SOURCE, ["policy.options={budgt:3}"], "EverySecond has no option budgt; it has budget, sinks"),
        (SOURCE, ["policy.options={budget:half}"], "policy.budget=half is not a whole number of tokens"),
        (SOURCE, ["policy.options={budget:0}"], "policy.budget=0 must be"),
        (SOURCE, ["policy.options={which:both}"], "policy.which=both is not one of even, odd"),
        (SOURCE, ["policy.options=3"], "policy.options=3 is not a set of options"),
        (SOURCE, ["policy.budget=3"], "file has no option budget; use policy.options.budget=3"),
        (TWO, [], "defines 2 policies (EverySecond, Other); define one"),
        (OUT_OF_TWO, [], "defines 2 policies (Base, Mine); define one"),
        (OF_INDEX.format("choose"), [], "Mine.choose is not called: the index of a layer chooses; write it as"),
        (OF_INDEX.format("renewed"), [], "write it as renew of an Index, and name this as index_class"),
        ("import math\n", [], "defines no policy; define one dataclass that inherits"),
        (SOURCE.replace("@dataclass(kw_only=True)\n", ""), [], "EverySecond is no dataclass; write @dataclass"),
        (SOURCE.replace("Which = Which.odd", "Which"), [], "policy.which is missing; give a value"),
        (SOURCE.replace("which: Which = Which.odd", "which: LayerView = None"), [], "EverySecond cannot be used: "),
        ("1 +\n", [], "cannot be loaded: SyntaxError: invalid syntax"),
        ("\0", [], "is a binary file"),
    ],
)
def test_mistakes_are_told_in_one_line(path: Path, source: str, overrides: list[str], says: str) -> None:
    path.write_text(source, encoding="utf-8")
    with pytest.raises(ValueError) as raised:
        made("policy=file", f"policy.path={path}", *overrides)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "policy=file needs policy.path=<python file>"),
        (["policy.path=no/such.py"], "policy.path=no/such.py does not exist"),
        (["policy.path=."], "policy.path=. is a folder"),
    ],
)
def test_a_file_that_is_not_there_is_told(overrides: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made("policy=file", *overrides)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_infer_runs_it(path: Path, model: str, num_ranks: int, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    given = ["policy=file", f"policy.path={path}", "policy.options={budget:40}", f"prompt.text={TEXT}"]
    report = path.with_name("run.json")
    assert main(options(model, *given, f"report={report}")) == 0
    expected = capfd.readouterr().out
    told = json.loads(report.read_text(encoding="utf-8"))
    assert told["policy"] == {"name": "file", "path": str(path), "options": {"budget": 40}}
    assert set(told["ranks"][0]["kept_tokens"]) == {40}
    if num_ranks == 1:
        return
    done = torchrun(*options(model, *given, f"report={report}"))
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text(encoding="utf-8"))
    assert set(told["ranks"][1]["kept_tokens"]) == {40}
    assert done.stdout == expected  # slots do not depend on the ranks
    path.unlink()
    done = torchrun(*options(model, *given))
    assert done.returncode != 0 and done.stdout == ""
    assert our_lines(done.stderr) == [f"[rank 0/2] policy.path={path} does not exist; check the path"]


FAILING = SOURCE.replace(
    "        slots_n = ", "        if view.layer == 1:\n            raise KeyError('gone')\n        slots_n = "
)
FAILING = FAILING.replace("which: Which = Which.odd", "which: Which = Which.odd\n    budget: int | float = 16")
LINE = 1 + FAILING[: FAILING.index("raise KeyError")].count("\n")
FAILS_AT_ONCE = SOURCE + "\n    def __post_init__(self):\n        self.nothing.at_all\n"


@pytest.mark.parametrize(
    ("source", "given", "place"),
    [
        (FAILING, ["policy=file", "policy.path={path}"], f"policy.path={{path}} line {LINE} in score: KeyError"),
        (
            FAILING,
            ["policy=sequence", "policy.steps=[window,{{name:file,path:'{path}'}}]"],
            f"policy.path={{path}} line {LINE} in score: KeyError: 'gone'",
        ),
        (
            FAILING,
            ["policy=adakv", "policy.scorer={{name:file,path:'{path}'}}"],
            f"policy.path={{path}} line {LINE} in score: KeyError",
        ),
        (
            FAILING,
            [
                "generation.speculate=policy",
                "generation.speculate_always=true",
                "draft.policy={{name:file,path:'{path}'}}",
            ],
            f"draft.policy.path={{path}} line {LINE} in score: KeyError",
        ),
        (FAILS_AT_ONCE, ["policy=file", "policy.path={path}"], "policy.path={path} line 24 in __post_init__: Attr"),
        ("x = 1\nx.y\n", ["policy=file", "policy.path={path}"], "policy.path={path} line 2 in <module>: Attribute"),
        (
            "x = 1\nx.y\n",
            ["generation.speculate=policy", "draft.policy={{name:file,path:'{path}'}}"],
            "draft.policy.path={path} line 2 in <module>: AttributeError",
        ),
    ],
    ids=["alone", "step", "scorer", "draft", "construction", "loading", "loading for drafts"],
)
def test_an_error_in_the_file_names_its_last_line_there(
    source: str,
    given: list[str],
    place: str,
    path: Path,
    model: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path.write_text(source, encoding="utf-8")
    args = options(model, f"prompt.text={TEXT}", *(each.format(path=path) for each in given))
    assert exit_status(main, args) == 2
    line = one_line_error(capfd)
    assert line.startswith(place.format(path=path))
    assert line.endswith("; RUNAHEAD_TRACEBACK=1 prints the traceback")
    monkeypatch.setenv("RUNAHEAD_TRACEBACK", "1")
    assert exit_status(main, args) == 2
    assert "Traceback (most recent call last)" in capfd.readouterr().err


def test_a_name_that_is_imported_from_elsewhere_is_told_with_where_it_is(path: Path) -> None:
    path.write_text("from policies.gumbel import LayerView\n", encoding="utf-8")
    with pytest.raises(ImportError, match="cannot import name 'LayerView' .*; use from policies import LayerView$"):
        policy_class(str(path))


def test_evaluate_names_the_line_too(path: Path, model: str, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    path.write_text(FAILING, encoding="utf-8")
    args = ["model=hf", f"model.path={model}", "tasks=[copy]", "copy.passage=32", "copy.filler=64", "ranks.threads=1"]
    assert exit_status(evaluate, [*args, f"policies=[full,{{name:file,path:'{path}'}}]"]) == 2
    assert f"policy.path={path} line {LINE} in score: KeyError: 'gone'; " in capfd.readouterr().err


def fail_in_file(ranks: Ranks, path: str) -> list[str]:
    """Each rank knows of an error in the file on rank 0: its status would be 2 on both."""
    try:
        ranks.on_rank_0("the policies", lambda: policy_class(path))
        return []
    except Exception as error:
        return [type(error).__name__, line_of(error), str(is_mistake(error))]


def test_other_ranks_are_told_the_line(path: Path) -> None:
    path.write_text("x = 1\nx.y\n", encoding="utf-8")
    pool = RankPool(2)
    try:
        first, second = pool.run(fail_in_file, str(path))
    finally:
        pool.close()
    assert first[0] == "AttributeError" and second[0] == "SharedError"
    assert first[1:] == second[1:]
    assert first[1].startswith(f"policy.path={path} line 2 in <module>: ") and first[2] == "True"


def load_own_file(ranks: Ranks, folders: list[str], content: list[str]) -> str:
    """Every rank has a folder and a file of its own."""
    os.chdir(folders[ranks.rank])
    Path("my.py").write_text(content[ranks.rank], encoding="utf-8")
    policy = {"name": "sequence", "steps": ["h2o", {"name": "file", "path": "my.py"}]}
    try:
        load_files(policy, ranks)
        [_, made] = ranks.on_rank_0("the policies", lambda: policies_of(policy, "policy"))
        return type(made).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_must_have_the_same_file(tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    pool = RankPool(2)
    try:
        names = [str(folder) for folder in folders]
        assert pool.run(load_own_file, names, [SOURCE, SOURCE]) == ["EverySecond"] * 2
        first, second = pool.run(load_own_file, names, [SOURCE, SOURCE + "\n"])
    finally:
        pool.close()
    assert first == "ValueError: rank 1 and rank 0 differ in policy.path=my.py; give every rank the same file"
    assert second == first.replace("ValueError", "SharedError")
