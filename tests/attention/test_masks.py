"""`MaskRule` answers as transformers' own index functions do, without a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from runahead.attention.masks import MaskRule
from runahead.model.seam import ATTENTION_NAME, register

NO_PADS = torch.zeros(1, dtype=torch.long)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": causal_mask_function,
    "window of 1": sliding_window_causal_mask_function(1),
    "window of 5": sliding_window_causal_mask_function(5),
    "window of 16": sliding_window_causal_mask_function(16),
    "chunks of 1": chunked_causal_mask_function(1, NO_PADS),
    "chunks of 6": chunked_causal_mask_function(6, NO_PADS),
    "chunks of 16": chunked_causal_mask_function(16, NO_PADS),
}


def mask_of(function: Callable[..., Any], num_tokens: int) -> Tensor:
    """Boolean (queries, keys), one pair at a time, as the function is defined."""
    positions = torch.arange(num_tokens)
    return torch.tensor([[bool(function(0, 0, query, key)) for key in positions] for query in positions])


MASKS = {name: mask_of(function, 40) for name, function in FUNCTIONS.items()}

every_function = pytest.mark.parametrize("name", FUNCTIONS)


@every_function
@given(queries=st.lists(st.integers(0, 39), min_size=1), keys=st.lists(st.integers(0, 39), min_size=1))
def test_allowed_is_the_index_function_at_any_positions(name: str, queries: list[int], keys: list[int]) -> None:
    allowed = MaskRule(FUNCTIONS[name]).allowed(torch.tensor(queries), torch.tensor(keys))
    assert torch.equal(allowed, MASKS[name][queries][:, keys])


@every_function
def test_first_key_is_the_earliest_that_is_seen(name: str) -> None:
    rule = MaskRule(FUNCTIONS[name])
    for _ in range(2):  # computed, then remembered
        for query in range(40):
            assert rule.first_key(query) == int(MASKS[name][query].nonzero()[0])


@every_function
def test_a_causal_rule_sees_no_later_key(name: str) -> None:
    assert not MaskRule(FUNCTIONS[name]).sees_later_keys
    assert MaskRule(bidirectional_mask_function).sees_later_keys


@every_function
@given(data=st.data())
def test_is_causal_looks_at_every_query_and_key(name: str, data: st.DataObject) -> None:
    """is_causal() samples a few rows; the answer must hold for all of them."""
    start = data.draw(st.integers(0, 39))
    end = data.draw(st.integers(start + 1, 40))
    first = data.draw(st.integers(0, start))
    seen = MASKS[name][start:end, first:end]
    causal = torch.arange(first, end)[None] <= torch.arange(start, end)[:, None]
    assert MaskRule(FUNCTIONS[name]).is_causal(start, end, first) == bool((seen == causal).all())


@every_function
@given(data=st.data())
def test_a_window_holds_for_every_query(name: str, data: st.DataObject) -> None:
    """window() samples a few rows, too. Of chunks it may say so only where queries of one chunk, or one query, ask."""
    start = data.draw(st.integers(0, 39))
    end = data.draw(st.integers(start + 1, 40))
    size = MaskRule(FUNCTIONS[name]).window(start, end)
    distances = torch.arange(start, end)[:, None] - torch.arange(40)[None]
    if size is not None:
        assert torch.equal(MASKS[name][start:end], (distances >= 0) & (distances < size))
    assert size is not None or name.startswith("chunks")


def test_a_rule_that_may_hold_a_gpu_s_tensors_tells_no_window() -> None:
    assert MaskRule(packed_sequence_mask_function(torch.zeros(1, 8)), "meta").window(0, 8) is None
    assert MaskRule(bidirectional_mask_function).window(0, 8) is None


@pytest.mark.parametrize(
    ("create", "name"),
    [
        (create_causal_mask, "causal"),
        (create_sliding_window_causal_mask, "window of 5"),
        (create_chunked_causal_mask, "chunks of 6"),
    ],
)
def test_transformers_hands_its_own_rule_through(create: Callable[..., Any], name: str) -> None:
    """It takes the place of the mask, and has the positions of the sequence, whatever chunk the forward has."""
    register()
    config = AutoConfig.for_model(
        "llama", sliding_window=5, attention_chunk_size=6, num_hidden_layers=1, attn_implementation=ATTENTION_NAME
    )
    rule = create(config=config, inputs_embeds=torch.zeros(1, 40, 8), attention_mask=None, past_key_values=None)
    assert isinstance(rule, MaskRule)
    assert torch.equal(rule.allowed(torch.arange(40), torch.arange(40)), MASKS[name])


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lambda blocks: or_masks(causal_mask_function, blocks), "causal"),
        (lambda blocks: and_masks(or_masks(blocks, causal_mask_function), sliding_window_overlay(5)), "window of 5"),
        (lambda blocks: and_masks(sliding_window_overlay(5), or_masks(causal_mask_function, blocks)), "window of 5"),
    ],
)
def test_blocks_of_images_are_left_out_of_the_rule_of_a_text(place: Callable[..., Any], name: str) -> None:
    """They are a tensor of the positions of one forward, and nobody waits for its values: on "meta" it has none."""
    meta = torch.device("meta")
    rule = MaskRule(place(blockwise_overlay(torch.full((1, 7), -1, device=meta))), meta)
    assert torch.equal(rule.allowed(torch.arange(40), torch.arange(40)), MASKS[name])
    assert rule.sees_everything == (name == "causal")
    assert rule.first_key(30) == int(MASKS[name][30].nonzero()[0])  # on the host


def test_no_answer_needs_a_square_of_the_length() -> None:
    """A mask of a million tokens would have 10^12 entries."""
    length = 1_000_000
    for function in FUNCTIONS.values():
        rule = MaskRule(function)
        assert rule.first_key(length) <= length
        rule.is_causal(length - 1000, length)
    assert MaskRule(FUNCTIONS["window of 16"]).first_key(length) == length - 15


@pytest.mark.parametrize("name", ["causal", "window of 5", "window of 16"])
def test_a_rule_without_tensors_is_evaluated_on_the_host(name: str) -> None:
    """A GPU would make the host wait for all that is queued there; a tensor on "meta" has no values at all."""
    here, there = MaskRule(FUNCTIONS[name]), MaskRule(FUNCTIONS[name], torch.device("meta"))
    assert there.first_key(20) == here.first_key(20)
    assert there.is_causal(3, 20) == here.is_causal(3, 20)


def test_padding_before_a_text_is_left_out_of_the_rule_of_its_chunks() -> None:
    """It is a tensor that each forward makes, and positions are counted without it: on "meta" it has no values."""
    meta = torch.device("meta")
    rule = MaskRule(chunked_causal_mask_function(6, NO_PADS.to(meta)), meta)
    assert torch.equal(rule.allowed(torch.arange(40), torch.arange(40)), MASKS["chunks of 6"])
    assert (rule.first_key(20), rule.is_causal(18, 24, 18), rule.is_causal(17, 24, 17)) == (18, True, False)


def test_a_rule_with_tensors_is_evaluated_where_they_are() -> None:
    parts = packed_sequence_mask_function(torch.zeros(1, 40, device="meta"))
    rule = MaskRule(and_masks(parts, causal_mask_function), torch.device("meta"))
    with pytest.raises((RuntimeError, NotImplementedError)):
        rule.first_key(20)
