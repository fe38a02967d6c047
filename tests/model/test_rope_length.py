"""While `rotary_length` is open, rotary tables are those of the whole prompt; afterwards nothing has happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runahead.model.rope_length import LengthRotary, length_dependent_rotaries, rotary_length
from tests.families import FAMILIES, ROPE_THRESHOLD, Family, build

# Legend: C tokens of a forward, H head dim.

MAX_TOKENS = 100

DYNAMIC = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
BY_LAYER_TYPE = {
    "max_position_embeddings": ROPE_THRESHOLD,
    "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": PLAIN},
}
"""Gemma 3 has tables per layer type; here one kind of layer has dynamic ones."""

OF_POSITIONS = {
    "max_position_embeddings": 8 * ROPE_THRESHOLD,
    "rope_parameters": FAMILIES["phi3_longrope"].config["rope_parameters"] | {"short_mscale": 1.2, "long_mscale": 1.5},
}
"""Phi-3.5-MoE's embedding looks at the positions itself, and chooses a scale by the largest."""

CASES: dict[str, tuple[str | Family, dict[str, Any], dict[str, Any]]] = {
    "longrope": ("phi3_longrope", {}, {}),
    "longrope by positions": (Family(model_type="phimoe"), OF_POSITIONS, {}),
    "dynamic": ("llama_dynamic_ntk", {}, {}),
    "dynamic as complex numbers": (
        "llama4_text",
        {"max_position_embeddings": ROPE_THRESHOLD, "rope_parameters": DYNAMIC},
        {},
    ),
    "dynamic in full layers": ("gemma3_text", BY_LAYER_TYPE, {"layer_type": "full_attention"}),
    "plain in sliding layers": ("gemma3_text", BY_LAYER_TYPE, {"layer_type": "sliding_attention"}),
}

every_case = pytest.mark.parametrize("case", CASES)
lengths = st.one_of(st.integers(1, MAX_TOKENS), st.sampled_from([ROPE_THRESHOLD + d for d in (-1, 0, 1)]))


def rotary_of(case: str) -> tuple[LengthRotary, dict[str, Any]]:
    """A new rotary embedding, which has seen nothing yet."""
    family, config, keywords = CASES[case]
    (rotary,) = length_dependent_rotaries(build(family, dtype=torch.float32, **config))
    return rotary, keywords


def tables(rotary: LengthRotary, positions: Tensor, keywords: dict[str, Any]) -> tuple[Tensor, Tensor]:
    made = rotary.module(torch.zeros(1, 1), positions, **keywords)
    cos, sin = made if isinstance(made, tuple) else (made.real, made.imag)
    return cos, sin


OLD = {case: rotary_of(case) for case in CASES}
"""These go from example to example and have seen them all."""


@every_case
@pytest.mark.parametrize("outer", [[MAX_TOKENS], [MAX_TOKENS, 3]])
def test_a_forward_inside_another_has_the_tables_of_its_own_length(case: str, outer: list[int]) -> None:
    rotary, keywords = rotary_of(case)
    positions = torch.arange(4)[None]
    with rotary_length([rotary], [4]):
        alone = tables(rotary, positions, keywords)
    with rotary_length([rotary], outer):
        around = tables(rotary, positions, keywords)
        with rotary_length([rotary], [4]):
            inside = tables(rotary, positions, keywords)
        after = tables(rotary, positions, keywords)
    assert all(map(torch.equal, inside, alone))
    assert all(map(torch.equal, after, around))
    if "sliding" not in case:
        assert not torch.equal(around[0][:1], alone[0])


@every_case
@given(length=lengths, data=st.data())
def test_chunk_gets_the_whole_prompts_tables(case: str, length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    fresh, keywords = rotary_of(case)
    whole = tables(fresh, torch.arange(length)[None], keywords)  # transformers, on the whole prompt, the first time
    old, _ = OLD[case]
    with rotary_length([old], [length]):
        chunk = tables(old, torch.arange(start, end)[None], keywords)
    for ours, theirs in zip(chunk, whole, strict=True):
        assert torch.equal(ours, theirs[:, start:end])


@every_case
@given(row_lengths=st.lists(lengths, min_size=1, max_size=4), num_tokens=st.integers(1, 10))
def test_rows_of_a_batch_get_the_tables_of_their_own_lengths(
    case: str, row_lengths: list[int], num_tokens: int
) -> None:
    rotary, keywords = OLD[case]
    positions = torch.stack([torch.arange(n - num_tokens, n).clamp_min(0) for n in row_lengths])
    with rotary_length([rotary], row_lengths):
        batch = tables(rotary, positions, keywords)
    for row, length in enumerate(row_lengths):
        with rotary_length([rotary], [length]):
            alone = tables(rotary, positions[row : row + 1], keywords)
        for ours, theirs in zip(batch, alone, strict=True):
            assert torch.equal(ours[row], theirs[0].expand_as(ours[row]))


@pytest.mark.parametrize("case", [case for case in CASES if "sliding" not in case])
def test_tables_change_behind_the_threshold(case: str) -> None:
    """The tests above say nothing of tables that do not change."""
    rotary, keywords = OLD[case]
    positions = torch.arange(ROPE_THRESHOLD)[None]
    seen = []
    for length in (ROPE_THRESHOLD, ROPE_THRESHOLD + 1):
        with rotary_length([rotary], [length]):
            seen.append(tables(rotary, positions, keywords)[0])
    assert not torch.equal(*seen)


@every_case
def test_forward_is_the_modules_own_again_afterwards(case: str) -> None:
    rotary, _ = rotary_of(case)
    with pytest.raises(RuntimeError, match="in between"), rotary_length([rotary], [5]):
        assert "forward" in vars(rotary.module)
        raise RuntimeError("in between")
    assert "forward" not in vars(rotary.module)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "gpt2", "bloom"])
def test_models_with_fixed_tables_are_left_alone(family: str) -> None:
    assert length_dependent_rotaries(build(family)) == []
