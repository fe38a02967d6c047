"""Prompts of a run of launch/infer.py reuse what earlier ones begin with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launch.infer import INFER, main
from launch.inputs import prefixes
from launch.inputs.options import ineffective_settings
from launch.inputs.prefixes import LEAST_SHARED, num_shared
from runahead import Ranks
from runahead.config import Device, RanksOptions
from runahead.model.memory import token_bytes
from runahead.serving.room import MEMORY_SHARE
from runahead.thinning.rank_policies import RankPolicies
from tests.families import save_tiny_llama
from tests.ranks.tasks import tiny_model
from tests.serving.fakes import chat_tokenizer

TEXT = "the letters of the captain to his sister, from the ice. " * 6
ALIKE = [f"{TEXT}{question}" for question in ("who?", "where?", "the ship?")]
APART = ["who?", "where?", f"{TEXT}the ship?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer()))


def run(model: str, folder: Path, texts: list[str], *more: str) -> list[dict[str, Any]]:
    """The prompts of the report of a run."""
    asked, report = folder / "asked.jsonl", folder / "report.json"
    asked.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    given = ["model=hf", f"model.path={model}", f"prompt.file={asked}", "prompt.chat=false", f"report={report}"]
    assert main([*given, "generation.max_new_tokens=8", "ranks.device=cpu", *more]) == 0
    prompts: list[dict[str, Any]] = json.loads(report.read_text())["prompts"]
    return prompts


def in_common(first: list[int], second: list[int]) -> int:
    return next(at for at, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1)


def cached(prompts: list[dict[str, Any]]) -> list[int]:
    return [each["cached_tokens"] for each in prompts]


def test_later_prompts_reuse_what_earlier_ones_begin_with_and_the_warm_up_is_no_earlier_one(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = chat_tokenizer()
    ids = [tokenizer(text)["input_ids"] for text in ALIKE]
    common = [in_common(ids[0], each) for each in ids[1:]]
    found = run(model, tmp_path, ALIKE, "warmup=1")
    assert cached(found) == [0, *common] and min(common) > LEAST_SHARED
    told = capfd.readouterr().err
    assert re.search(rf"tokens reused +{sum(common):,} of", told)
    without = run(model, tmp_path, ALIKE, "prompt.prefix_cache_bytes=0")
    assert cached(without) == [0, 0, 0]
    assert [each["new_token_ids"] for each in found] == [each["new_token_ids"] for each in without]
    small = run(model, tmp_path, ALIKE, "prompt.prefix_cache_bytes=1")  # which has room for none
    assert cached(small) == [0, 0, 0]


def test_prompts_that_have_little_in_common_keep_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.inputs.prefixes.KeptPrefixes", None)  # so that a run that makes one fails
    assert cached(run(model, tmp_path, APART)) == [0, 0, 0]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_prefixes_make_way_for_the_states_of_the_prompts_that_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 2 of 4 layers of the hybrid hold states; a row has two copies until a tree has that after its prompt."""
    model, free = tiny_model(family), 10**9
    monkeypatch.setattr(prefixes, "free_bytes", lambda *_: free)
    with Ranks.start(RanksOptions(device=Device.cpu)) as ranks:
        text = [[*range(40)], [*range(40)]]
        kept = prefixes.kept_prefixes(INFER.compose([]), model, ranks, RankPolicies(), [text, [[*range(41)]]])
    assert kept is not None and kept.tree.limit_bytes == int(MEMORY_SHARE * free) // 2
    kept.make_way(text, 8)
    states = 0 if family == "llama" else 2 * 2 * 2 * 8 * (64 * 4 + 4 * 8 * 8)  # as in tests/serving/test_hybrids.py
    assert kept.tree.limit_bytes == (int(MEMORY_SHARE * free) - 2 * 48 * token_bytes(model) - states) // 2


def test_what_is_in_the_way_is_told(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cached(run(model, tmp_path, ALIKE, "policy=h2o", "policy.budget=64")) == [0, 0, 0]
    assert "prompts that begin alike are computed whole: policy h2o decides by" in capfd.readouterr().err
    with pytest.raises(ValueError, match="policy h2o decides by what is computed.*leave the tree out"):
        INFER.read(["prompt.prefix_cache_bytes=9", "policy=h2o", "policy.budget=64"])
    with pytest.raises(ValueError, match="prompt.prefix_cache_bytes=-1 must be a number of bytes, or auto"):
        INFER.read(["prompt.prefix_cache_bytes=-1"])
    [sentence] = ineffective_settings(INFER.compose(["prompt.text=a", "prompt.prefix_cache_bytes=9"]))
    assert sentence == "prompt.prefix_cache_bytes has no effect on a single prompt"
    assert INFER.compose(["prompt.prefix_cache_bytes=4k"]).prompt.prefix_cache_bytes == 4096


def test_what_prompts_share_is_counted_over_calls() -> None:
    first, second = [1, 2, 3, 4, 5], [1, 2, 3, 9]
    assert num_shared([[first], [second]]) == 3
    assert num_shared([[first, second]]) == 0  # which are computed at once
    assert num_shared([[first], [first]]) == 4  # the last token is always computed
    assert num_shared([[first], [second]], has_states=True) == 0
    assert num_shared([[first], [[*first, 7]]], has_states=True) == 5
