"""Policies keep what their papers say, told from transformers' own attention matrices of each prompt by itself.

Plain loops over float64 matrices (N, S, S) that are never formed in the runtime; prompts run there as one padded batch.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest
import torch
from torch import Tensor

from policies.base import Policy
from policies.chunkkv import ChunkKV
from policies.h2o import H2O
from policies.scissorhands import Scissorhands
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from tests.families import build, prompt, throughout
from tests.policies.running import Run
from tests.ranks.tasks import tiny_model

# Legend: N query heads, S prompt tokens.

BUDGET, WINDOW, KERNEL, SINKS, CHUNK = 16, 4, 3, 3, 5
BUDGET, WINDOW, KERNEL, SINKS, CHUNK, VOTERS = 16, 4, 3, 3, 5, 12
LENGTHS = (40, 23, 9)
FAMILIES = ["llama", "gpt2", "gpt_bigcode", "bloom", "qwen3_next", "falcon_h1"]
"""Two query heads per KV head, a KV head for each, one for all; ALiBi; layers with states between, and in one with
attention."""


@cache
def attention_NSS(family: str, row: int) -> list[Tensor]:  # noqa: N802
    """Attention probabilities of every layer, by transformers."""
    module = build(family, attention="eager")
    with torch.inference_mode(), throughout(module.dtype):
        output = module(input_ids=torch.tensor([prompt(LENGTHS[row], row)]), output_attentions=True, use_cache=False)
    return [layer[0] for layer in output.attentions if layer is not None]


def streaming_llm(attention: Tensor, heads: range) -> list[float]:
    """Scores of the tokens: the first ones, then the later the better."""
    length = attention.shape[-1]
    return [float(length if token < SINKS else token) for token in range(length)]


def snapkv(attention: Tensor, heads: range, *, by_mean: bool) -> list[float]:
    length = attention.shape[-1]
    before = length - WINDOW
    voters = range(before, length)
    votes = [fmean(float(attention[h, query, token]) for h in heads for query in voters) for token in range(before)]
    scores = []
    for token in range(before):
        near = [votes[t] for t in range(token - KERNEL // 2, token + KERNEL // 2 + 1) if 0 <= t < before]
        scores.append(sum(near) / KERNEL if by_mean else max(near))
    return [*scores, *([2.0] * WINDOW)]  # the window itself stays


def chunkkv(attention: Tensor, heads: range) -> list[float]:
    """A token has the score of its chunk; chunks begin at the prompt's first token, and the last may be shorter."""
    before = attention.shape[-1] - WINDOW
    votes = [float(attention[heads.start : heads.stop, before:, token].mean()) for token in range(before)]
    chunks = [votes[first : first + CHUNK] for first in range(0, before, CHUNK)]
    return [*(fmean(chunk) for chunk in chunks for _ in chunk), *([2.0] * WINDOW)]


def h2o(attention: Tensor, heads: range) -> list[float]:
    length = attention.shape[-1]
    received = [fmean(float(attention[h, :, token].sum()) for h in heads) for token in range(length)]
    return [2.0 * length if token >= length - BUDGET // 2 else received[token] for token in range(length)]


def scissorhands(attention: Tensor, heads: range) -> list[float]:
    """Minus the number of voters that give a token less than 1/t, of t tokens that they see."""
    length = attention.shape[-1]
    voters = range(max(0, length - VOTERS), length)
    neglected = [
        fmean(
            sum(float(attention[h, query, token]) * (query + 1) < 1 for query in voters if query >= token)
            for h in heads
        )
        for token in range(length)
    ]
    return [1.0 if token >= length - WINDOW else -number for token, number in enumerate(neglected)]


def tova(attention: Tensor, heads: range) -> list[float]:
    """Scores are over all heads of the layer, not over this one's."""
    return [fmean(attention[:, -1, token].tolist()) for token in range(attention.shape[-1])]


POLICIES = {
    "streaming_llm": (StreamingLLM(budget=BUDGET, sinks=SINKS), streaming_llm),
    "snapkv": (
        SnapKV(budget=BUDGET, window=WINDOW, kernel=KERNEL),
        lambda attention, heads: snapkv(attention, heads, by_mean=False),
    ),
    "snapkv by the mean": (
        SnapKV(budget=BUDGET, window=WINDOW, kernel=KERNEL, pooling="avg"),  # type: ignore[arg-type]
        lambda attention, heads: snapkv(attention, heads, by_mean=True),
    ),
    "chunkkv": (ChunkKV(budget=BUDGET, window=WINDOW, chunk=CHUNK), chunkkv),
    "scissorhands": (Scissorhands(budget=BUDGET, recent=WINDOW, window=VOTERS), scissorhands),
    "h2o": (H2O(budget=BUDGET), h2o),
    "tova": (TOVA(budget=BUDGET), tova),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", POLICIES)
def test_each_head_of_each_row_keeps_the_tokens_of_the_paper(name: str, family: str) -> None:
    policy, scores_of = POLICIES[name]
    assert isinstance(policy, Policy)
    run = Run(tiny_model(family), [policy], [prompt(length, row) for row, length in enumerate(LENGTHS)])
    run.prefill()
    for layer, stored in enumerate(run.kept.layers):
        num_heads = stored.shape.num_kv_heads
        positions_BKm = stored.positions_BKn().expand(-1, num_heads, -1)
        for row, length in enumerate(LENGTHS):
            attention = attention_NSS(family, row)[layer]
            group = len(attention) // num_heads
            for head in range(num_heads):
                scores = scores_of(attention, range(head * group, (head + 1) * group))
                best_first = sorted(
                    range(length), key=[-score for score in scores].__getitem__
                )  # of equals the earlier
                kept = [position for position in positions_BKm[row, head].tolist() if position >= 0]
                assert kept == sorted(best_first[:BUDGET]), (layer, row, head)
