"""Wrong options are told in one sentence: with status 2 by the command line, or before the model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.evaluation.contenders import contenders
from benchmarks.evaluation.options import RULER_FILES, RULER_TASKS, TASK_NAMES, EvaluateRun, ineffective_settings
from benchmarks.evaluation.pictures import PYRAMID_FROM, TITLES
from benchmarks.evaluation.tasks import TASKS
from benchmarks.evaluation.tasks.ruler import PROMPTS
from launch.evaluate import EVALUATE, HELP, main
from policies.adakv import AdaKV
from policies.criticalkv import CriticalKV
from policies.h2o import H2O
from policies.kvzap import KVzap
from policies.pyramidinfer import PyramidInfer
from policies.retriever import Retriever
from policies.score_maps import ScoreMaps
from policies.snapkv import SnapKV
from policies.window import Window
from runahead.config import Positions


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            "tasks=[perplexity,speed]",
            "tasks has speed, which is not one of perplexity, copy, passkey, needle, ruler, key_value, throughput",
        ),
        ("tasks=[copy,copy]", "tasks=[copy,copy] must name at least one task, and each only once"),
        ("tasks=[]", "tasks=[] must name at least one task"),
        ("policies=[]", "policies=[] must name at least one policy"),
        ("budgets=[0.2,1.5]", "budgets has 1.5, which is neither a whole number of tokens of at least 1 nor a share"),
        ("budgets=[0]", "budgets has 0, which is neither"),
        ("budgets=half", "budgets has half, which is neither"),
        ("budgets=[0.2,0.2]", "budgets=[0.2, 0.2] must hold each value only once"),
        ("perplexity.chunk=0", "perplexity.chunk=0 must be at least 1"),
        ("perplexity.tokens=many", "perplexity.tokens=many is not a whole number"),
        ("copy.samples=0", "copy.samples=0 must be at least 1"),
        ("passkey.depths=[0.5,2]", "passkey.depths=[0.5, 2.0] must be a list of shares from 0 to 1"),
        ("needle.lengths=[]", "needle.lengths=[] must be a list of whole numbers of at least 1"),
        ("needle.question=none", "needle.question=none is not one of separate, with_context"),
        ("ruler.question=none", "ruler.question=none is not one of separate, with_context"),
        ("ruler.tasks=[vt,niah]", "ruler.tasks has niah, which is not one of niah_single_1, niah_single_2"),
        ("ruler.lengths=[0]", "ruler.lengths=[0] must be a list of whole numbers of at least 1"),
        ("ruler.new_tokens=-1", "ruler.new_tokens=-1 must be at least 0"),
        ("key_value.pairs=[]", "key_value.pairs=[] must be a list of whole numbers of at least 1"),
        ("key_value.search_samples=0", "key_value.search_samples=0 must be at least 1"),
        ("throughput.kv_tokens=100", "throughput.kv_tokens=100 must hold at least one row of 768 tokens"),
        ("throughput.kv_bytes=0", "throughput.kv_bytes=0 must be at least 1"),
        ("speed.rounds=1", "unknown option speed.rounds"),
    ],
)
def test_a_wrong_option_is_one_sentence(option: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(says)


@pytest.mark.parametrize(
    ("entries", "budgets", "says"),
    [
        (["snapkw"], [0.5], "policies=snapkw is not one of full, adakv"),
        ([3], [0.5], "policies has 3, which is neither a name nor {name:"),
        ([{"kernel": 3}], [0.5], "is neither a policy's name nor {name:"),
        ([{"name": "window", "kernel": 3}], [0.5], "policies: window has no option kernel; it has budget"),
        (["snapkv"], [], r"policies: snapkv needs budgets=\[...\], or a budget among its options"),
        (["snapkv"], [8], "snapkv with a budget of 8 tokens: policy.budget=8 has no room for policy.window=32"),
        ([{"name": "snapkv", "budget": "half"}], [0.5], "^policy.budget=half is not a whole number of tokens"),
        ([{"name": "adakv", "scorer": {"name": "snapkv", "budget": 2.0}}], [0.5], "^policy.budget=2.0 must be"),
        (["full", "full"], [0.5], "policies has full more than once; leave one out"),
        ([{"name": "window", "positions": "new"}], [0.5], "positions=new is not one of original, reencoded"),
        ([{"name": "full", "bits": 5}], [], "cache.bits=5 must be 8, 4 or 2"),
        ([{"name": "full", "attention": "sparse"}], [], "^attention=sparse must be causal or streaming_heads"),
        ([{"name": "full", "attention": "xattention"}], [], "^attention=xattention must be causal or streaming_heads"),
    ],
)
def test_a_policy_that_cannot_be_is_one_sentence(entries: list[object], budgets: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        contenders(entries, budgets)
    assert "\n" not in str(caught.value)


def test_policies_with_a_budget_come_under_every_one_and_others_once() -> None:
    found = contenders(["full", "snapkv", {"name": "window", "budget": 64}, "pyramidinfer"], [0.2, 64])
    assert [(each.label, each.budget) for each in found] == [
        ("full", None),
        ("snapkv", 0.2),
        ("snapkv", 64),
        ("window", 64),
        ("pyramidinfer", 0.2),
        ("pyramidinfer", 64),
    ]
    of = [each.policies.last for each in found]
    assert (
        of[0] == [] and of[1] == [SnapKV(budget=0.2)] and of[2] == [SnapKV(budget=64)] and of[3] == [Window(budget=64)]
    )
    # A share is PyramidInfer's mean, which leaves room beside the recent tokens.
    assert of[4] == [PyramidInfer(mean_keep=0.2, recent_ratio=0.1, min_tokens=1)] and of[5] == [PyramidInfer(budget=64)]


def test_a_budget_of_a_wrapper_is_that_of_what_it_wraps() -> None:
    given = {"name": "adakv", "scorer": {"name": "snapkv", "window": 8}, "alpha": 0.5}
    own = {"name": "adakv", "scorer": {"name": "snapkv", "budget": 64}}
    found = contenders(["adakv", given, own], [0.2])
    assert [each.label for each in found] == [
        "adakv",
        "adakv(scorer=snapkv(window=8), alpha=0.5)",
        "adakv(scorer=snapkv)",
    ]
    assert [each.budget for each in found] == [0.2, 0.2, 64]
    assert [each.policies.last for each in found] == [
        [AdaKV(scorer=SnapKV(budget=0.2))],
        [AdaKV(scorer=SnapKV(budget=0.2, window=8), alpha=0.5)],
        [AdaKV(scorer=SnapKV(budget=64))],
    ]
    [critical] = contenders([{"name": "criticalkv", "scorer": "h2o"}], [0.2])
    assert critical.policies.last == [CriticalKV(scorer=H2O(budget=0.2))]


def test_options_of_a_policy_are_its_own() -> None:
    window = {"name": "window", "budget": 64, "positions": "reencoded"}
    sequence = {"name": "sequence", "steps": ["pyramidinfer", window | {"budget": 32}]}
    sequence["steps"][1].pop("positions")  # type: ignore[union-attr, index]
    cosine = {"name": "pyramidinfer", "schedule": "cosine"}
    given = {"name": "pyramidinfer", "recent_ratio": 0.3}
    found = contenders([window, sequence, cosine, given], [0.5])
    assert [each.budget for each in found] == [64, 32, None, 0.5]
    assert found[0].policies.positions is Positions.reencoded
    assert found[1].policies.last == [PyramidInfer(), Window(budget=32)]
    assert found[2].policies.last == [PyramidInfer(schedule="cosine")]  # type: ignore[arg-type]
    assert found[3].policies.last == [PyramidInfer(mean_keep=0.5, recent_ratio=0.3, min_tokens=1)]


def test_policies_retrieve_from_texts_of_any_length_unless_told_otherwise() -> None:
    given = {"name": "quest", "min_tokens": 100}
    in_sequence = {"name": "sequence", "steps": ["pyramidinfer", {"name": "quest", "fetch": 0.2}]}
    found = contenders(["infinigen", given, in_sequence], [0.5])
    retrievers = [each.policies.retriever for each in found]
    assert [each and each.min_tokens for each in retrievers] == [0, 100, 0]
    assert [each.label for each in found[:2]] == ["infinigen", "quest(min_tokens=100)"]
    assert found[0].settings == {"name": "infinigen"}


OWN_POLICIES = """
from dataclasses import dataclass
from policies.base import Policy
from policies.quest import Quest
from policies.scorer import Scorer
"""


def of_file(path: Path, body: str) -> dict[str, object]:
    """An entry of policies= whose file has this class."""
    path.write_text(f"{OWN_POLICIES}\n@dataclass(kw_only=True)\n{body}\n")
    return {"name": "file", "path": str(path)}


def test_a_policy_of_a_file_comes_under_every_budget(tmp_path: Path) -> None:
    """It may stand by itself, as a scorer, and as a step; an option of its own stays."""
    own = of_file(tmp_path / "mine.py", "class Mine(Scorer):\n    power: float = 1.0\n    def score(self, view): ...")
    powerful = own | {"options": {"power": 2.0}}
    sequence = {"name": "sequence", "steps": ["pyramidinfer", own]}
    found = contenders([own, powerful, {"name": "adakv", "scorer": own}, sequence], [0.2, 64])
    path = own["path"]
    assert [(each.label, each.budget) for each in found] == [
        (label, budget)
        for label in (
            f"{path}",
            f"{path}(power=2.0)",
            f"adakv(scorer={path})",
            f"sequence(steps=[pyramidinfer,{path}])",
        )
        for budget in (0.2, 64)
    ]
    kept = [each.policies.last[-1] for each in found]
    assert [getattr(each, "scorer", each).budget for each in kept] == [0.2, 64] * 4  # type: ignore[attr-defined]
    assert kept[2].power == 2.0 and found[-1].policies.last[0] == PyramidInfer()  # type: ignore[attr-defined]
    of_one_curve = contenders([own | {"options": {"budget": budget}} for budget in (64, 128)], [])
    assert [(each.label, each.budget) for each in of_one_curve] == [(path, 64), (path, 128)]


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_a_policy_of_a_file_may_take_counts_alone(future: str, tmp_path: Path) -> None:
    own = of_file(tmp_path / "mine.py", "class Mine(Policy):\n    budget: int = 1024\n    def keep(self, view): ...")
    (tmp_path / "mine.py").write_text(future + (tmp_path / "mine.py").read_text())
    found = contenders([own, {"name": "sequence", "steps": ["minicache", own]}], [512, 64])
    assert [each.policies.last[-1].budget for each in found] == [512, 64] * 2  # type: ignore[attr-defined]
    says = (
        r"^budgets=0.2: .*mine.py takes no shares, .* such as budgets=\[512,1024\], or declare budget: Budget in Mine$"
    )
    with pytest.raises(ValueError, match=says):
        contenders([own], [512, 0.2])


def test_a_policy_without_a_budget_says_why_it_runs_once(tmp_path: Path) -> None:
    own = of_file(tmp_path / "mine.py", "class Mine(Policy):\n    def keep(self, view):\n        return None")
    own_retriever = of_file(tmp_path / "page.py", "class Mine(Quest):\n    pass")
    in_steps = {"name": "sequence", "steps": ["minicache", "quest"]}
    cosine = {"name": "pyramidinfer", "schedule": "cosine"}
    found = contenders(["full", "snapkv", own, own_retriever, "quest", in_steps, cosine, "minicache"], [0.5])
    full, snapkv, *once = found
    no_budget = "it has no option budget, and its other options say what it keeps"
    retrieves = "it keeps all keys and values; its option fetch says how many of them a token reads"
    assert full.once is None and snapkv.once is None and all(each.budget is None for each in once)
    assert [each.once for each in once] == [
        no_budget,
        retrieves,
        retrieves,
        retrieves,
        "its mean_keep has no effect with schedule=cosine",
        no_budget,
    ]
    [mine] = once[1].policies.last
    assert isinstance(mine, Retriever) and mine.min_tokens == 0  # retrieves, as others do in an evaluation
    with pytest.raises(ValueError, match="policies: Mine has no option budget"):
        contenders([own | {"options": {"budget": 0.2}}], [])


def test_a_threshold_says_what_kvzap_keeps_in_place_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes once, with budgets= or without; with a budget among its options it is refused."""
    monkeypatch.setattr("benchmarks.evaluation.contenders.digest_of_path", str)
    monkeypatch.setattr(ScoreMaps, "load", lambda *_: None)
    kvzap = {"name": "kvzap", "predictor": "maps"}
    assert [each.budget for each in contenders([kvzap], [0.5, 256])] == [0.5, 256]
    for budgets in ([], [0.5, 256]):
        [one] = contenders([kvzap | {"threshold": 0.0}], budgets)
        assert (one.budget, one.once) == (None, "its threshold says what it keeps")
        [policy] = one.policies.last
        assert isinstance(policy, KVzap) and policy.threshold == 0.0
    with pytest.raises(ValueError, match="policy.budget=64 has no effect with policy.threshold=0.0"):
        contenders([kvzap | {"threshold": 0.0, "budget": 64}], [])


def test_a_policy_may_store_few_bits() -> None:
    found = contenders(["snapkv", {"name": "snapkv", "bits": 4}, {"name": "full", "bits": 2}], [0.5])
    assert [each.policies.storage.bits for each in found] == [None, 4, 2]
    assert [each.name for each in found] == ["snapkv, 50%", "snapkv(bits=4), 50%", "full(bits=2)"]


def test_the_defaults_of_the_file_are_those_of_the_dataclasses() -> None:
    assert EVALUATE.compose([]) == EvaluateRun()


def test_a_single_value_is_a_list_of_one() -> None:
    run = EVALUATE.compose(["policies=window", "tasks=copy", "budgets=64", "report=out/eval.json"])
    assert (run.policies, run.tasks, run.budgets, run.lines) == (["window"], ["copy"], [64], "out/eval.jsonl")


def test_entries_with_options_come_through_the_command_line() -> None:
    run = EVALUATE.compose(["policies=[full,{name:window,budget:64}]", "text.file=a b,c.txt"])
    assert run.policies == ["full", {"name": "window", "budget": 64}] and run.text.file == "a b,c.txt"


def test_settings_without_effect_are_told() -> None:
    run = EVALUATE.compose(["tasks=[passkey]", "copy.samples=2", "text.file=x.txt", "passkey.samples=2"])
    assert ineffective_settings(run) == [
        "copy.* has no effect without copy among tasks",
        "text.file has no effect without perplexity, copy, needle or ruler among tasks",
    ]
    run = EVALUATE.compose(["tasks=[ruler]", "ruler.tasks=[vt,qa_1]", "ruler.squad=a.json", "ruler.hotpotqa=b.json"])
    assert ineffective_settings(run) == ["ruler.hotpotqa has no effect without qa_2 among ruler.tasks"]


def test_every_task_is_known_everywhere() -> None:
    assert tuple(TASKS) == TASK_NAMES
    assert TITLES.keys() == set(PYRAMID_FROM) == set(TASKS) - {"file"}  # which has the name of its file
    assert {*PROMPTS, *RULER_FILES} == set(RULER_TASKS)
    assert all(name in HELP for name in TASKS)
