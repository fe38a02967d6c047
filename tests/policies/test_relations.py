"""Effects of policies on a real model and a real text: relations with margins, not values.

A passage, other text, the passage again: perplexity of the text that follows hides what a policy lost of the passage,
and the loss of the passage's second time (copy-NLL) shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import Tensor

from policies.base import Policy
from policies.pyramidinfer import PyramidInfer
from policies.streaming_llm import StreamingLLM
from runahead import Model, ModelOptions
from runahead.conversation import Conversation
from runahead.thinning.rank_policies import RankPolicies

TEXT = Path(__file__).resolve().parents[2] / "examples" / "frankenstein_letters.txt"
PASSAGE, FILLER, BEHIND = 128, 640, 128
STARTS = (1400, 2100)
"""Where in the text the samples begin."""

CHUNK, BUDGET = 32, 0.2
"""StreamingLLM is fed so many tokens at a time, and keeps this share of all."""


@cache
def model() -> Model:
    return Model.load(ModelOptions(), torch.device("cpu"))


@cache
def text_ids() -> Tensor:
    tokenizer = model().tokenizer
    assert tokenizer is not None
    return torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8")).input_ids)


def conversation(policy: Policy | None) -> Conversation:
    return Conversation(model(), RankPolicies() if policy is None else RankPolicies(last=[policy]))


@dataclass(frozen=True)
class Losses:
    """Means over the samples, in nats per token: the passage again, and the text that follows."""

    copy: float
    text: float


@cache
def losses(schedule: str | None) -> Losses:
    """Behind the prompt of each sample, of which PyramidInfer keeps some K,V; all of them without a schedule."""
    policy = None if schedule is None else PyramidInfer(schedule=schedule, mean_keep=0.7)  # type: ignore[arg-type]
    found = []
    for start in STARTS:
        ids = text_ids()[start : start + PASSAGE + FILLER + BEHIND]
        kept = conversation(policy)
        kept.feed(ids[None, : PASSAGE + FILLER])
        found.append([nll(kept, ids[:PASSAGE]), nll(kept, ids[PASSAGE + FILLER :])])
    return Losses(*map(mean, zip(*found, strict=True)))


def nll(kept: Conversation, ids_T: Tensor) -> float:
    """Loss of these tokens if they came next; they see what is kept, and each other."""
    assert kept.logits_BV is not None
    logits_TV = torch.cat([kept.logits_BV, kept.peek(ids_T[None, :-1])[0]])
    return float(torch.nn.functional.cross_entropy(logits_TV, ids_T))


@pytest.mark.slow
def test_the_less_is_dropped_at_first_the_better() -> None:
    """Table 3 of PyramidInfer, at the same mean over layers. Two samples show it in recall, not in perplexity."""
    less, uniform, more = losses("power"), losses("uniform"), losses("more")
    assert less.copy < uniform.copy - 0.1
    assert uniform.copy < more.copy - 0.05
    assert less.text < more.text + 0.05


@pytest.mark.slow
def test_recall_shows_what_perplexity_hides() -> None:
    full, pyramid = losses(None), losses("power")
    assert pyramid.text < full.text + 0.1
    assert pyramid.copy > full.copy + 1


@pytest.mark.parametrize(("ratio", "share"), [(0.05, 0.73), (0.1, 0.75), (0.2, 0.77), (0.4, 0.83), (0.6, 0.88)])
def test_the_more_recent_tokens_the_more_is_kept(ratio: float, share: float) -> None:
    """The model has 30 layers, and the schedule is the authors'."""
    policy = PyramidInfer(schedule="cosine", recent_ratio=ratio)  # type: ignore[arg-type]
    lengths = policy.lengths(PASSAGE + FILLER, 30)
    assert mean(lengths) / lengths[0] == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("num_tokens", [512, 768])
@pytest.mark.slow
def test_a_window_needs_sinks(num_tokens: int) -> None:
    with_sinks, without = streamed(num_tokens, sinks=4), streamed(num_tokens, sinks=0)
    assert without > with_sinks + 0.3


def streamed(num_tokens: int, sinks: int) -> float:
    """Loss of a text, in nats per token, of which a window and the first tokens are kept from the first chunk on."""
    kept = conversation(StreamingLLM(budget=round(BUDGET * num_tokens), sinks=sinks))
    ids = text_ids()[: num_tokens + 1]
    total = 0.0
    for start in range(0, num_tokens, CHUNK):
        logits_BCV = kept.feed(ids[None, start : start + CHUNK], all_logits=True)
        targets = ids[start + 1 : start + CHUNK + 1]
        total += float(torch.nn.functional.cross_entropy(logits_BCV[0], targets, reduction="sum"))
    return total / num_tokens
