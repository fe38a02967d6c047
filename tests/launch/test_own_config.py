"""--config-dir and --config-name: config files of the user's own, as Hydra's users know them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launch.infer import INFER
from launch.inputs.options import RunOptions
from launch.program.compose import CONF
from partitioner.search import SEARCH
from runahead.config import PrefillName

MINE = """
defaults:
  - infer
  - size: tiny
  - _self_
  - override policy: small
generation:
  max_new_tokens: 3
"""
FILES = {
    "mine.yaml": MINE,
    "policy/small.yaml": "name: snapkv\nbudget: 0.3\n",
    "size/tiny.yaml": "# @package _global_\nmodel: {name: random, config: shape.json}\n",
    "experiment/alone.yaml": "# @package _global_\ndefaults:\n  - override /prefill: single\nwarmup: 2\n",
    "experiment/set/b.yaml": "# @package _global_\nwarmup: 5\n",
    "my_search.yaml": "defaults: [search, _self_]\nsearch: {lengths: [128]}\ntable: t.json\n",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        write(tmp_path / name, text)
    return tmp_path


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def run_of(*args: object) -> RunOptions:
    run = INFER.read([str(arg) for arg in args]).run
    assert run is not None
    return run


def mistake(*args: object) -> str:
    with pytest.raises(ValueError) as error:
        run_of(*args)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_a_primary_config_of_ones_own_builds_on_ours(own):
    run = run_of("--config-dir", own, "--config-name", "mine")
    assert (run.policy["name"], run.policy["budget"]) == ("snapkv", 0.3)
    assert (run.model.config, run.generation.max_new_tokens) == ("shape.json", 3)
    assert run.prefill == RunOptions().prefill


def test_the_command_line_wins_over_a_primary_config_of_ones_own(own):
    run = run_of("-cd", own, "-cn", "mine", "policy=h2o", "generation.max_new_tokens=7")
    assert (run.policy["name"], run.policy.get("budget"), run.generation.max_new_tokens) == ("h2o", None, 7)


def test_a_group_gets_choices_of_ones_own(own):
    assert run_of(f"--config-dir={own}", "policy=small").policy["budget"] == 0.3
    run = run_of(f"-cd={own}", "experiment=alone")
    assert (run.prefill.name, run.warmup) == (PrefillName.single, 2)
    assert run_of("-cd", own, "experiment=set/b").warmup == 5


def test_a_group_of_ones_own_is_added_with_a_plus(own):
    assert run_of("--config-dir", own, "+size=tiny").model.config == "shape.json"
    assert mistake("--config-dir", own, "size=tiny") == "unknown option size; see --help"


def test_a_group_of_the_primary_config_is_chosen_without_a_plus(own):
    write(own / "size" / "other.yaml", "# @package _global_\nwarmup: 9\n")
    assert run_of("--config-dir", own, "--config-name", "mine", "size=other").warmup == 9


def test_other_programs_take_configs_of_ones_own(own):
    run = SEARCH.read(["--config-dir", str(own), "--config-name", "my_search", "search.ranks=[2]"]).run
    assert run is not None
    assert (run.search.lengths, run.search.ranks, run.table) == ([128], [2], "t.json")


def test_cfg_job_shows_what_configs_of_ones_own_lead_to(own):
    printed = INFER.read(["--config-dir", str(own), "--cfg", "job", "policy=small"]).to_print
    assert printed is not None
    assert yaml.safe_load(printed)["policy"]["budget"] == 0.3


def test_mistakes_in_the_flags(own):
    assert mistake("--config-dir", own / "nowhere") == f"--config-dir {own}/nowhere is not a folder; check the path"
    assert mistake("--config-dir") == "--config-dir needs a folder, as in --config-dir <folder>"
    assert "there is no config of that name; there are bench, doctor, duo_gates, encode" in mistake(
        "--config-name", "mine"
    )
    assert "mine, my_search, plan, retrieval_heads, search, serve, skew" in mistake("-cd", own, "-cn", "yours")
    assert "is not one of" in (told := mistake("-cd", own, "policy=smaller")) and "small, snapkv" in told
    assert "is not one of" in mistake("-cd", own, "policy=../policy/small")


def test_a_file_that_ours_would_hide_is_refused(own):
    write(own / "policy" / "h2o.yaml", "name: h2o\nbudget: 0.9\n")
    assert "policy/h2o.yaml would not be read, since Runahead has one; rename the file" in mistake("--config-dir", own)
    (own / "policy" / "h2o.yaml").unlink()
    write(own / "decode" / "last.yaml", "name: last\n")
    assert "decode/last.yaml would not be read, since Runahead has one" in mistake("--config-dir", own)
    assert run_of("--config-dir", CONF) == RunOptions()


BROKEN = [
    ("defaults: [infer, _self_]\na: [1\n", "broken.yaml line 3: not YAML (expected ',' or ']'"),
    ("a: 1\na: 2\n", "broken.yaml line 2: not YAML (found duplicate key a); correct the file"),
    ("a:\tb\n", "line 1: not YAML (found character"),
    ("a: !!python/object:os.system 3\n", "could not determine a constructor"),
    (b"\xff\xfe\x00", "a config file cannot be read: 'utf-8' codec"),
    ("[1, 2]\n", "primary config 'broken' must be a DictConfig"),
    ("defaults: [infr]\n", "In 'broken': Could not load 'infr'."),
    ("defaults: [broken]\n", "maximum recursion depth exceeded"),
    ("defaults: 3\n", "defaults must be a list"),
    ("defaults: [[1]]\n", "Unsupported type in defaults"),
    ("defaults: [infer, nope: x]\n", "Could not find 'nope/x'"),
    ("defaults: [infer, override policy: nope]\n", "Could not find 'policy/nope'"),
    ("prompt: {bach: 1}\n", "unknown option prompt.bach; did you mean prompt.batch?"),
    ("policy: {budgett: 1}\n", "has no option budgett"),
    ("policy: 3\n", "policy=3 is not a set of options such as {budget:512}"),
    ("prompt: 3\n", "prompt=3 is not"),
    ("prompt: null\n", "prompt=null is not"),
    ("prompt: {batch: x}\n", "prompt.batch=x is not a whole number"),
    ("report: ${x.y}\n", "report=${x.y} cannot be used"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_a_broken_config_of_ones_own_is_told_in_one_line(own, text, message):
    write(own / "broken.yaml", text)
    assert message in mistake("--config-dir", own, "--config-name", "broken")
