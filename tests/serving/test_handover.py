"""Prompts that are handed over to other engines: what is in the files, and what becomes of those that cannot be."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import DynamicCache

from runahead.reuse.tiers.file_format import FORMAT, checksum
from tests.families import largest_difference, prompt, rounded, throughout
from tests.conftest import RankPools
from tests.serving import handover_tasks

PROMPTS = [prompt(40, seed=1), prompt(33, seed=2)]
"""Longer than the windows of the families, which are of 8 tokens."""


@cache
def of_transformers(family: str, ids: tuple[int, ...]) -> list[Tensor]:
    """Keys and values (T, K, H + V) of all tokens in each layer, by transformers alone."""
    module = rounded(family)
    cache = DynamicCache()  # without a config it keeps tokens out of a window, too
    with torch.inference_mode(), throughout(module.dtype):
        module(torch.tensor([ids]), past_key_values=cache)
    return [torch.cat([each.keys[0], each.values[0]], dim=-1).transpose(0, 1) for each in cache.layers]


def read(folder: Path, name: str) -> tuple[dict[str, str], list[Tensor]]:
    """Metadata and layers of a file, as a reader that knows the format alone finds them."""
    with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
        about = file.metadata()
        layers = [file.get_tensor(f"layer.{number}") for number in range(len(file.keys()))]
    assert json.loads(about["crc32"]) == [checksum(layer) for layer in layers]
    return about, layers


def require_same(folder: Path, name: str, family: str, ids: list[int]) -> list[int]:
    """Check a file against transformers; returns the first token of each layer."""
    about, layers = read(folder, name)
    first = json.loads(about["first"])
    assert (about["format"], about["key"], about["tokens"]) == (FORMAT, name, str(len(ids)))
    expected = of_transformers(family, tuple(ids))
    assert len(layers) == len(expected)
    for layer, start, theirs in zip(layers, first, expected, strict=True):
        assert len(layer) == len(ids) - start
        assert largest_difference(layer, theirs[start:]) < 1e-9
        assert largest_difference(layer[:-1], theirs[start:][1:]) > 1e-3  # moved by a token they are others
    return first


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3"])
def test_a_file_has_the_keys_and_values_of_transformers(
    rank_pools: RankPools, family: str, size: int, tmp_path: Path
) -> None:
    folder = tmp_path / "handover"
    *others, handed = rank_pools.run(size, handover_tasks.hand_over, family, [PROMPTS, PROMPTS[:1]], str(folder))
    assert not any(others), "other ranks than the last one have not all keys and values"
    assert [each.error for each in handed] == ["", "", ""]
    assert [each.is_new for each in handed] == [True, True, False]
    names = {each.row: each.name for each in handed}
    for row, ids in enumerate(PROMPTS):
        require_same(folder, names[0, row], family, ids)
    assert names[1, 0] == names[0, 0]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_layers_of_windows_lack_only_what_no_later_token_sees(rank_pools: RankPools, tmp_path: Path) -> None:
    handed = rank_pools.run(3, handover_tasks.hand_over, "gemma2", [PROMPTS[:1]], str(tmp_path / "a"))[-1]
    first = require_same(tmp_path / "a", handed[0].name, "gemma2", PROMPTS[0])
    window = 8
    assert any(first) and not all(first), "gemma2 has layers of both kinds"
    assert all(start <= len(PROMPTS[0]) - window for start in first)


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_prompt_reuses_is_in_its_file(rank_pools: RankPools, size: int, tmp_path: Path) -> None:
    folder, before = tmp_path / "a", PROMPTS[0]
    longer = [before[:30] + prompt(12, seed=3), before[:30] + prompt(9, seed=4)]
    task = handover_tasks.hand_over
    handed = rank_pools.run(size, task, "llama", [[before], longer, [before]], str(folder), [0, 30, 39])[-1]
    assert [each.error for each in handed] == [""] * 4
    for each, ids in zip(sorted(handed, key=lambda each: each.row), [before, *longer, before], strict=True):
        require_same(folder, each.name, "llama", ids)


def test_a_prompt_that_is_computed_in_pieces_is_handed_over(rank_pools: RankPools, tmp_path: Path) -> None:
    [handed] = rank_pools.run(1, handover_tasks.hand_over, "llama", [PROMPTS], str(tmp_path / "a"), (), 7)
    for each, ids in zip(sorted(handed, key=lambda each: each.row), PROMPTS, strict=True):
        require_same(tmp_path / "a", each.name, "llama", ids)
