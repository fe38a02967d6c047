"""policy= on the command line: which policies come of it, and what is said about mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import policies as package
from benchmarks.evaluation import options as evaluation_options
from benchmarks.evaluation.options import EvaluateRun
from launch.duo_gates import GATES
from launch.encode import ENCODE
from launch.fit_kvzap import FIT
from launch.infer import INFER
from launch.inputs.options import DraftOptions, RunOptions, ineffective_settings
from launch.inputs.policies import NAMES, ineffective_options, options_of, rank_policies
from launch.program.arguments import choices
from launch.program.compose import Program
from launch.retrieval_heads import HEADS
from launch.server.options import ServeRun, warnings
from launch.skew import SKEW
from policies import POLICIES, PolicyTable
from policies.adakv import AdaKV
from policies.expected_attention import ExpectedAttention
from policies.h2o import H2O
from policies.pyramidinfer import PyramidInfer
from policies.snapkv import Pooling, SnapKV
from policies.streaming_llm import StreamingLLM
from runahead.config import GenerationOptions, Speculate
from runahead.thinning.rank_policies import RankPolicies

ROOT = Path(__file__).resolve().parents[2]

WITH_FILES = ("kvzap",)
"""Policies that need a file for the model; tests/policies/test_kvzap.py makes one."""


def policies(*overrides: str) -> RankPolicies:
    return rank_policies(INFER.compose(overrides).policy)


def test_every_policy_has_a_name_on_the_command_line() -> None:
    with INFER.config_loader({}) as loader:
        assert set(choices("policy", loader)) >= set(NAMES)
    for name in NAMES:
        given = {"sequence": {"steps": ["h2o"]}, "per_rank": {"ranks": {"last": "h2o"}}}.get(name, {})
        assert RunOptions(policy={"name": name} | given).policy["name"] == name
    for name, *settings in (("snapkv",), ("sequence", "policy.steps=[h2o]"), ("per_rank", "policy.ranks.last=h2o")):
        assert INFER.compose([f"policy={name}", *settings]).policy["name"] == name
    with pytest.raises(ValueError, match=re.escape(f"policy=? is not one of {', '.join(sorted(NAMES))}")):
        INFER.compose(["policy=?"])


def test_a_policy_is_found_by_its_line_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('@dataclass(kw_only=True)\nclass Mine(Scorer, name="mine"):\n    size: int = 3\n')
    (tmp_path / "pages.py").write_text('class Pages(Index):\n    name = "pages"\n')
    assert PolicyTable({"place": tmp_path}).places == {"mine": "place.mine:Mine"}


def test_a_policy_is_a_file_of_its_name() -> None:
    for name, kind in POLICIES.items():
        assert kind.__module__.rpartition(".")[2] == kind.name == name
        assert getattr(package, kind.__name__) is kind


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="policy=starattention is not one of full, adakv"):
        POLICIES["starattention"]
    assert "starattention" not in POLICIES and [1] not in POLICIES


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_every_option_of_a_policy_is_for(name: str) -> None:
    text = INFER.read([f"policy={name}", "--help"]).to_print
    assert text is not None
    for option in fields(options_of(name)):
        if option.init:
            found = re.search(rf"^  policy\.{option.name}(\.\w+)?=[^ ]* +[^ ]", text, re.MULTILINE)
            assert found, f"{name} says nothing of {option.name}"
    assert max(map(len, text.splitlines())) <= 120


def test_help_gives_defaults_and_choices() -> None:
    text = INFER.read(["--help", "policy=pyramidinfer"]).to_print
    assert text is not None
    assert "policy.mean_keep=0.6" in text
    assert re.search(r"policy.schedule=power .*\(cosine\|power\|uniform\|more\)", text)


def test_help_does_not_wait_for_torch_and_what_a_policy_is_loads_no_method() -> None:
    methods = {kind.__module__ for kind in POLICIES.values()}
    program = (
        "import sys\n"
        "from launch.infer import main\n"
        "assert main(['--help']) == 0\n"
        "print('torch' in sys.modules)\n"
        "import policies.base, policies.retriever\n"
        "print(*sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    *_, has_torch, modules = done.stdout.splitlines()
    assert has_torch == "False"
    assert "policies.base" in modules.split()
    assert not methods & set(modules.split())


@pytest.mark.parametrize("program", [ENCODE, FIT, GATES, HEADS, SKEW], ids=lambda program: program.module)
def test_what_makes_files_for_policies_runs_by_the_name_in_its_help(program: Program[Any]) -> None:
    assert program.help.startswith(f"usage: python -m {program.module} ")
    main = resolve_name(f"{program.module}:main")
    assert main.__module__ == f"launch.{program.name}"


def test_nothing_said_keeps_everything() -> None:
    assert not policies()
    assert not policies("policy=full")


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("full", *WITH_FILES)])
@pytest.mark.sampled(3)
def test_a_name_alone_is_the_policy_with_its_defaults(name: str) -> None:
    assert policies(f"policy={name}") == RankPolicies.everywhere([POLICIES[name]()])


def test_options_reach_their_policy() -> None:
    assert policies("policy=snapkv", "policy.budget=0.2", "policy.window=16", "policy.pooling=avg") == (
        RankPolicies.everywhere([SnapKV(budget=0.2, window=16, pooling=Pooling.avg)])
    )
    assert policies("policy=h2o", "policy.budget=512") == RankPolicies.everywhere([H2O(budget=512)])
    assert policies("policy=pyramidinfer", "policy.mean_keep=0.7") == (
        RankPolicies.everywhere([PyramidInfer(mean_keep=0.7)])
    )


def test_a_policy_around_another_has_its_options_in_one_line() -> None:
    found = policies("policy=adakv", "policy.scorer={name:expected_attention,budget:0.25}", "policy.alpha=0.5")
    assert found == RankPolicies.everywhere([AdaKV(scorer=ExpectedAttention(budget=0.25), alpha=0.5)])
    assert policies("policy=adakv") == RankPolicies.everywhere([AdaKV(scorer=SnapKV(), alpha=0.2)])


def test_options_that_stand_in_the_scorer_are_taken_there() -> None:
    assert policies("policy=adakv", "policy.scorer.budget=0.3") == policies(
        "policy=adakv", "policy.scorer={name:snapkv,budget:0.3}"
    )


def test_a_sequence_has_steps_with_options_of_their_own() -> None:
    steps = "policy.steps=[pyramidinfer,{name:streaming_llm,budget:64,sinks:2}]"
    expected = [PyramidInfer(), StreamingLLM(budget=64, sinks=2)]
    assert policies("policy=sequence", steps) == RankPolicies.everywhere(expected)
    both_accumulate = policies("policy=sequence", "policy.steps=[pyramidinfer,h2o]")
    assert both_accumulate == RankPolicies.everywhere([PyramidInfer(), H2O()])


def test_ranks_may_differ() -> None:
    found = policies("policy=per_rank", "policy.ranks.last=pyramidinfer", "policy.ranks.others=full")
    assert found == RankPolicies(last=[PyramidInfer()])
    found = policies(
        "policy=per_rank", "policy.ranks.last={name:snapkv,budget:256}", "policy.ranks.others=pyramidinfer"
    )
    assert found == RankPolicies(last=[SnapKV(budget=256)], others=[PyramidInfer()])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["policy=starattention"], "policy=starattention is not one of"),
        (["policy=h2o", "policy.window=3"], "h2o has no option window; it has budget"),
        (["policy.budget=3"], "policy.budget=3 has no effect with policy=full; add policy=cake|"),
        (["policy=snapkv", "policy.budget=0"], "policy.budget=0 must be"),
        (
            ["policy=snapkv", "policy.budget=half"],
            "policy.budget=half is not a whole number of tokens of",
        ),
        (["policy=snapkv", "policy.pooling=median"], "policy.pooling=median is not one of max, avg"),
        (["policy=snapkv", "policy.window=wide"], "policy.window=wide is not a whole number"),
        (["policy=pyramidinfer", "policy.schedule=steep"], "policy.schedule=steep is not one of"),
        (["policy=sequence"], "needs steps"),
        (
            ["policy=adakv", "policy.scorer=pyramidinfer"],
            "policy.scorer=pyramidinfer does not score tokens; use snapkv",
        ),
        (["policy=adakv", "policy.scorer=retro"], "policy.scorer=retro is not one of"),
        (["policy=adakv", "policy.alpha=1.5"], "policy.alpha=1.5 must be a share"),
        (["policy=adakv", "policy.budget=64"], "adakv has no option budget; use policy.scorer.budget=64"),
        (["policy=criticalkv", "policy.window=9"], "criticalkv has no option window; use policy.scorer.window=9"),
        (
            ["policy=adakv", "policy.scorer=h2o", "policy.budget=64"],
            "adakv has no option budget; use policy.scorer='{name:h2o,budget:64}'",
        ),
        (["policy=adakv", "policy.scorer=h2o", "policy.window=64"], "adakv has no option window; it has scorer, alpha"),
        (["policy=sequence", "policy.budget=64"], "no option budget; use policy.steps='[{name:cake,budget:64}]'"),
        (["policy=per_rank", "policy.budget=64"], "use policy.ranks.last='{name:cake,budget:64}'"),
        (["policy=file", "policy.budget=64"], "file has no option budget; use policy.options.budget=64"),
        (["policy=sequence", "policy.steps=[starattention]"], "policy.steps=starattention is not one of"),
        (["policy=sequence", "policy.steps=[3]"], "neither a policy's name"),
        (["policy.steps=[h2o]"], "no effect with policy=full; add policy=sequence"),
        (["policy=per_rank"], "needs policy.ranks.last"),
        (["policy.ranks.last=h2o"], "add policy=per_rank"),
        (["policy=per_rank", "policy.ranks.first=h2o"], "unknown option policy.ranks.first; did you mean policy.ranks"),
        (["policy=h2o", "policy.sink=4"], "h2o has no option sink; it has budget, sinks"),
        (["policy=snapkv", "policy.pool=avg"], "which calls it pooling; use policy.pooling=avg"),
        (
            ["policy=infinigen", "policy.pool.byte=1"],
            "unknown option policy.pool.byte; did you mean",
        ),
        (["policy=infinigen", "policy.pool=max"], "policy.pool=max is not one option but several: policy.pool.bytes"),
        (["policy=infinigen", "policy.pool.victim=random"], "policy.pool.victim=random is not one of fifo, lru"),
        (["policy=pyramidinfer", "policy.budget=0.5"], "whole number of tokens for pyramidinfer; shares"),
        (["policy.name=h3o"], "policy=h3o is not one of full, adakv"),
        (["policy=h2o", "prefill=tsp"], "needs prefill=kv_runahead or prefill=single"),
        (["policy=kvzap"], "needs policy.predictor=<file.safetensors>, made for the model; make it with python -m"),
        (["policy=kvzap", "policy.predictor=a, b"], "policy.predictor=a, b: there is no such file; make it with"),
    ],
)
@pytest.mark.sampled(2)
def test_mistakes_are_told_in_one_line(overrides: list[str], says: str) -> None:
    with pytest.raises(ValueError) as raised:
        policies(*overrides)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


TURNS = "policy.turn_tokens has no effect here: only a Conversation in Python has later turns"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"name": "quest", "turn_tokens": 64}, TURNS),
        ({"name": "per_rank", "ranks": {"last": {"name": "quest", "turn_tokens": 8}}}, TURNS),
        ({"name": "infllm", "clamped": False, "turn_tokens": 64}, TURNS),
        ({"name": "adakv", "scorer": {"name": "tova", "budget": 8}}, "policy=adakv shares nothing out over tova"),
        ({"name": "adakv", "scorer": "window"}, "policy=adakv shares nothing out over window"),
        ({"name": "quest"}, None),
        ({"name": "infllm", "turn_tokens": 64}, None),  # chunks of a prompt are turns, see test_infllm.py
        ({"name": "adakv", "scorer": "h2o"}, None),
        # TOVA's scores are by head where a step before has chosen by head.
        ({"name": "sequence", "steps": ["keydiff", {"name": "adakv", "scorer": "tova"}]}, None),
        ({"name": "sequence", "steps": ["window", {"name": "adakv", "scorer": "tova"}]}, "policy=adakv shares nothing"),
        ({"name": "sequence", "steps": [{"name": "adakv", "scorer": "tova"}, "h2o"]}, "policy=adakv shares nothing"),
        ({"name": "sequence", "steps": 5}, None),  # which is refused elsewhere
    ],
)
def test_policy_options_without_effect_are_told(policy: dict[str, Any], said: str | None) -> None:
    found = ineffective_options(policy)
    assert found == [] if said is None else len(found) == 1 and found[0].startswith(said)


def test_every_program_tells_them() -> None:
    """Without the line for policies in one of the three functions, or that for drafts, this fails."""
    assert len(ineffective_settings(RunOptions(policy={"name": "adakv", "scorer": "tova"}))) == 1
    assert len(warnings(ServeRun(policy={"name": "quest", "turn_tokens": 8}))) == 1
    drafter = DraftOptions(policy={"name": "adakv", "scorer": "tova"})
    drafted = RunOptions(draft=drafter, generation=GenerationOptions(speculate=Speculate.policy))
    (said,) = ineffective_settings(drafted)
    assert said.startswith("draft.policy=adakv shares nothing out over tova")
    compared: list[Any] = [{"name": "adakv", "scorer": "tova"}, {"name": "quest", "turn_tokens": 8}, "full"]
    (said,) = evaluation_options.ineffective_settings(EvaluateRun(policies=compared))  # questions are later turns
    assert said.startswith("policies=adakv shares nothing out over tova")
