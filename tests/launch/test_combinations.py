"""`python -m launch.combinations` says of options what a run with them would say, before it has read anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch import combinations, infer
from runahead.features.facts import FACTS, OF_MODEL, OF_RANKS
from runahead.features.refused import REFUSED
from runahead.features.slower import SLOWER, Way
from tests.exit_status import exit_status

LLAMA = ["model=random", "model.config=benchmarks/models/llama-70b.json"]
ROOT = Path(__file__).resolve().parents[2]


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    """Exit status and lines."""
    status = combinations.main(options)
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, printed.out.splitlines()


def test_options_that_go_together_are_told_with_what_the_model_decides(capsys: pytest.CaptureFixture[str]) -> None:
    status, [answer, *depends] = asked(capsys, "policy=adakv", "cache.bits=4")
    assert (status, answer) == (0, "yes")
    assert depends == [
        "depends on the model: not with marks; passes; states alone",
        "depends on the ranks and the prompt: slower with decode=auto on several stages; a GPU",
    ]


def test_a_run_of_the_defaults_depends_on_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys) == (0, ["yes"])


@pytest.mark.parametrize(
    "options",
    [
        ["policy=quest", "generation.speculate=lookup"],
        ["cache.bits=4", "prefill=zigzag"],
        ["policy=sequence", "policy.steps=[snapkv,snapkv]"],
        [*LLAMA, "policy=dms"],
        [*LLAMA, "ranks.tensor=3"],
        ["policy=snapkv", "policy.budget=2"],
        ["policy=unheard_of"],
    ],
)
def test_what_a_run_refuses_is_refused_in_the_same_words(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    status, [answer] = asked(capsys, *options)
    assert status == 2 and answer.startswith("no: ")
    if "ranks.tensor=3" in options:  # which a run says when three ranks were started
        assert "64 heads and 8 KV heads cannot be shared out to 3 ranks" in answer
        return
    assert exit_status(infer.main, [*options, "prompt.random_tokens=64"]) == 2
    assert answer.removeprefix("no: ") in capsys.readouterr().err


def test_the_config_of_the_model_decides_what_it_can(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights do not exist."""
    monkeypatch.chdir(ROOT)
    status, [answer, depends, _] = asked(capsys, *LLAMA, "policy=streaming_llm", "policy.positions=reencoded")
    assert (status, answer) == (0, "yes")
    assert depends == "depends on the model: not with positions that cannot be re-encoded"


def test_what_ranks_and_prompt_decide_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    _, [_, *depends] = asked(capsys, "prefill=zigzag")
    assert depends == [
        "depends on the model: not with shared KV layers; marks; states",
        "depends on the model and the ranks and the prompt: not with several stages with own positions",
        "depends on the ranks and the prompt: slower with decode=auto on several stages",
    ]
    _, [_, *depends] = asked(capsys, "prefill.chunk_tokens=64")
    assert depends == [
        "depends on the ranks and the prompt: not with a prompt in several chunks",
        "depends on the model: not with passes",
    ]


def test_drafting_policies_are_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    status, [answer] = asked(capsys, "generation.speculate=policy", "draft.policy={name:kvzip}")
    assert status == 2 and "a drafting policy kvzip decides on several layers together" in answer


def test_a_policy_of_a_file_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = asked(capsys, "policy=file", "policy.path=mine.py")
    assert lines[0] == "yes" and lines[-1] == "depends on the policy of a file, which is loaded when a run begins"


def test_what_is_slower_is_told_in_place_of_a_yes(capsys: pytest.CaptureFixture[str]) -> None:
    status, [answer, *_] = asked(capsys, "policy=snapkv", "ranks.device=cuda")
    assert status == 0
    assert answer.startswith("slower: decoding steps are computed without a CUDA graph: cache policies")


def test_a_server_is_asked_about_with_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = asked(capsys, "--serve", "policy=snapkv")
    told = [line for line in lines if line.startswith("slower: ")]
    assert status == 0 and [line.split(":")[1].strip() for line in told] == [
        Way.prompts_together.value,
        Way.shared_prompt.value,
    ]
    status, [answer] = asked(capsys, "--serve", "generation.speculate=model")
    assert status == 2 and "generation.speculate=model is for launch/infer.py" in answer


def test_the_list_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = asked(capsys, "--list")
    assert status == 0 and sum(line.startswith("    not with ") for line in lines) == len(REFUSED)
    assert sum(line.startswith("    slower with ") for line in lines) == len(SLOWER)


def test_facts_of_model_and_ranks_are_facts() -> None:
    assert OF_MODEL.keys() | OF_RANKS.keys() < FACTS.keys() and OF_MODEL.keys().isdisjoint(OF_RANKS)


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "launch.combinations", "policy=h2o", "decode=sharded", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, combinations.HELP)
