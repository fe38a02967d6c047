"""Tasks of ranks in test_streaming_prefill.py: top-level functions, since they run in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from transformers.masking_utils import and_masks, causal_mask_function

from policies.base import ModelFacts
from policies.streaming_heads import StreamingHeads
from runahead import ContextPartition, PrefillOptions, Ranks
from runahead.attention.masks import MaskRule
from runahead.attention.sparse.streaming import Streaming
from runahead.config import CacheOptions
from runahead.decoding.forward import forward_over
from runahead.prefill import PREFILLS, PrefillJob, PromptBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.families import throughout
from tests.ranks.tasks import PrefillOutcome, tiny_model

TABLE = ((True, False), (False, True), (True, True))
"""Whether each KV head of a tiny model streams, by layer."""


@dataclass(kw_only=True)
class GivenHeads(StreamingHeads):
    """A policy whose table is given: whether each KV head of each layer streams."""

    made_by = "a table"

    heads: str | None = "given"
    table: Sequence[Sequence[bool]] = field(default_factory=list)
    sinks: int = 3
    recent: int = 9
    evict_every: int = 1

    def found_in(self, heads: str, model: ModelFacts) -> list[list[bool]]:
        return [[not streams for streams in each] for each in self.table]

    def first_and_last(self, prompt_tokens: int) -> tuple[int, int]:
        return self.sinks, self.recent


def of_all(policy: StreamingHeads, bits: int | None = None) -> RankPolicies:
    return RankPolicies.everywhere([policy], storage=CacheOptions(bits=bits))


def prefill_and_steps(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    boundaries: tuple[int, ...],
    options: PrefillOptions,
    policy: GivenHeads,
    new_tokens: Sequence[int] = (),
    wrong: str = "",
) -> tuple[PrefillOutcome, list[list[list[float]]]]:
    """A prefill, and on the rank that decodes the logits (B, V) after each of these tokens."""
    model, batch = tiny_model(family), PromptBatch.from_prompts(prompts, ranks.device)
    policies = of_all(policy)
    with throughout(torch.float64), mistaken(wrong), torch.inference_mode():
        policies.check(model)
        job = PrefillJob(
            model=model,
            ranks=ranks,
            batch=batch,
            partition=ContextPartition(boundaries=boundaries).check(batch.num_tokens, ranks.size),
            capacity=batch.num_tokens + len(new_tokens),
            options=options,
            policies=policies,
        )
        done = PREFILLS[options.name]().run(job)
        steps: list[list[list[float]]] = []
        if done.cache is not None:
            given = {"pads": batch.pads, "prompt_tokens": batch.num_tokens}
            forward = forward_over(model, done.cache, policies.while_decoding, **given)
            for place, token in enumerate(new_tokens):
                ids_B1 = torch.full((len(prompts), 1), token)
                steps.append(forward(ids_B1, batch.num_tokens + place).tolist())
    return PrefillOutcome.after(done), steps


@contextmanager
def mistaken(wrong: str) -> Iterator[None]:
    """Context manager in which something is done wrong, if anything."""
    split, of, begin = Streaming._split, Streaming.of, Streaming.__post_init__

    def in_chunks(streaming: Streaming) -> None:  # a query sees what its chunk of so many tokens does
        begin(streaming)
        streaming.rule = MaskRule(and_masks(causal_mask_function, _same_chunk(streaming.window)))

    mistakes: dict[str, tuple[str, Any]] = {
        "a sink left out": ("_split", lambda self, span: split(replaced(self), span)),
        "streaming heads read all": ("of", lambda heads, **given: of(heads, **{**given, "exact": range(99)})),
        "windows by chunk": ("__post_init__", in_chunks),
    }

    def replaced(streaming: Streaming) -> Streaming:
        return replace(streaming, sinks=streaming.sinks - 1)

    with mock.patch.object(Streaming, *mistakes[wrong]) if wrong else nullcontext():
        yield


def _same_chunk(num_tokens: int) -> Callable[..., Any]:
    return lambda _batch, _head, query, key: key // num_tokens == query // num_tokens
