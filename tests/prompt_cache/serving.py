"""Prompts that reuse K,V, served and written out: the same tokens in one forward under a mask."""

# Legend: B batch, N query heads, K kv heads, S all tokens, H head dim, V value dim.

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from policies.reuse import ReusingPrompt, Segment, SegmentUse
from runahead import ContextPartition, Model, PrefillOptions, Ranks
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.decoding.forward import forward_over
from runahead.prefill import PrefillJob, PromptBatch
from runahead.prefill.kv_runahead import run_in_chain
from runahead.reuse import reused_kv
from runahead.reuse.reuse import Reuse, ReuseReport
from runahead.reuse.store import SegmentStore, StoreLimits
from runahead.thinning.rank_policies import RankPolicies
from tests.families import VOCAB_SIZE, build, throughout
from tests.ranks.tasks import tiny_model
from tests.tokenizers_for_tests import byte_level


def one_rank() -> Ranks:
    return Ranks(0, 1, device=torch.device("cpu"), backend="gloo", timeout_s=20.0)


def plain(ids: Sequence[int]) -> ReusingPrompt:
    return ReusingPrompt(uses=(), new_ids=tuple(ids), new_positions=tuple(range(len(ids))))


@cache
def byte_model() -> Model:
    """A model for the tokenizer of bytes."""
    module = build("llama", vocab_size=400)
    with throughout(torch.float64):
        return Model(module, byte_level(), name="bytes")


def chatting(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer of its own, with a chat template."""
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template = template
    return tokenizer


def random_ids(count: int, draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(count))


def random_segments(draw: random.Random) -> list[Segment]:
    """Three that lie behind each other, two with placeholders and one with a hole where another one lies."""
    outer = Segment(
        name="outer",
        ids=random_ids(11, draw),
        positions=(*range(6), *range(14, 19)),
        placeholders=(range(2, 4),),
    )
    inner = Segment(name="inner", ids=random_ids(8, draw), positions=tuple(range(6, 14)))
    last = Segment(
        name="last",
        ids=random_ids(12, draw),
        positions=tuple(range(25, 37)),
        placeholders=(range(3, 6), range(11, 12)),
        context_ids=outer.ids[:2],
        context_positions=(0, 1),
    )
    return [outer, inner, last]


def random_prompt(draw: random.Random, segments: list[Segment]) -> ReusingPrompt:
    """Some segments, of some of which the first tokens are computed again, arguments and text."""
    chosen = [segment for segment in segments if draw.random() < 0.8]
    new: dict[int, int] = {}
    uses = []
    for segment in chosen:
        again = draw.choice([0, 1, 3])
        stored = segment.stored
        new.update((segment.positions[index], segment.ids[index]) for index in stored[:again])
        uses.append(SegmentUse(segment=segment, parts=(range(again, len(stored)),)))
        for run in segment.placeholders:  # an argument may be shorter than its slot
            for index in list(run)[: draw.randint(0, len(run))]:
                new[segment.positions[index]] = random_ids(1, draw)[0]
    if draw.random() < 0.5:  # text in the gap
        new.update(zip(range(19, 19 + draw.randint(1, 5)), random_ids(5, draw), strict=False))
    new.update(zip(range(40, 40 + draw.randint(1, 6)), random_ids(6, draw), strict=False))
    at = sorted(new)
    return ReusingPrompt(uses=tuple(uses), new_ids=tuple(new[each] for each in at), new_positions=tuple(at))


@dataclass(kw_only=True)
class Served:
    """Logits (B, V) behind the prompts and behind each token that followed."""

    logits: list[Tensor]
    report: ReuseReport


def serve(
    model: Model,
    prompts: Sequence[ReusingPrompt],
    *,
    store: SegmentStore | None = None,
    ranks: Ranks | None = None,
    lengths: Sequence[int] | None = None,
    following: Sequence[int] = (),
    few_parts: int = reused_kv.FEW_PARTS,
    policies: RankPolicies | None = None,
    chunk_tokens: int | None = None,
) -> Served | None:
    """Prefill prompts, and feed tokens to all of them; None on ranks that do not decode.

    Args:
        lengths: new tokens of each stage.
        few_parts: up to so many are read where they lie in decoding.
        policies: of all ranks.
        chunk_tokens: new tokens that are computed at a time.
    """
    ranks, policies = ranks or one_rank(), policies or RankPolicies()
    store = store or SegmentStore(model)
    with throughout(model.dtype):
        reuse = Reuse(prompts, store, model, ranks)
        reuse.encode_missing()
        reused = reuse.fetch(policies.retriever)
        batch = PromptBatch.from_prompts([list(prompt.new_ids) for prompt in prompts], ranks.device)
        boundaries = (0, *accumulate(lengths or [batch.num_tokens]))
        job = PrefillJob(
            model=model,
            ranks=ranks,
            batch=batch,
            partition=ContextPartition(boundaries=boundaries).check(batch.num_tokens, ranks.num_stages),
            capacity=batch.num_tokens + len(following),
            options=PrefillOptions(),
            policies=policies,
            reused=reused,
            chunk_tokens=chunk_tokens,
        )
        done = run_in_chain(job)
        if done.cache is None or done.logits_BV is None:
            return None
        logits = [done.logits_BV]
        with patch.object(reused_kv, "FEW_PARTS", few_parts):
            cache = done.cache.for_decoding()
        if policies:  # under which a text is one, with what it reuses
            batch = PromptBatch.from_prompts([list(prompt.ids) for prompt in prompts], ranks.device)
        forward = forward_over(model, cache, policies.while_decoding, pads=batch.pads, prompt_tokens=batch.num_tokens)
        for step, token in enumerate(following):
            start = batch.num_tokens + step
            ids_B1 = torch.full((len(prompts), 1), token)
            logits.append(forward(ids_B1, start))
    return Served(logits=logits, report=reuse.report)


class MaskedAttention(CausalAttention):
    """Attention of all tokens at once, by a matrix of scores and a mask, at given positions."""

    def __init__(self, positions_S: Tensor, allowed_SS: Tensor) -> None:
        super().__init__(
            KVCache(Slabs.empty([], batch=1, spans=[], num_slabs=1, device=torch.device("cpu"))), start=0, pads=[0]
        )
        self.positions_S, self.allowed_SS = positions_S, allowed_SS

    def positions_BC(self, index_C: Tensor) -> Tensor:  # noqa: N802
        return self.positions_S[None]

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        group = q_BNCH.shape[1] // k_BKCH.shape[1]
        k_BNSH, v_BNSV = (x.repeat_interleave(group, dim=1) for x in (k_BKCH, v_BKCV))
        scores = q_BNCH @ k_BNSH.transpose(-1, -2) * terms.scaling
        if terms.softcap is not None:
            scores = terms.softcap * torch.tanh(scores / terms.softcap)
        if terms.key_bias is not None:
            scores = scores + terms.key_bias(self.positions_S)[None, :, None, :]
        allowed_SS = self.allowed_SS
        if terms.rule is not None:
            allowed_SS = allowed_SS & terms.rule.allowed(self.positions_S, self.positions_S)
        scores = scores.masked_fill(~allowed_SS, -torch.inf)
        if terms.sinks_N is not None:  # a key more, without a value
            sink = terms.sinks_N.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
            return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1] @ v_BNSV
        return torch.softmax(scores, dim=-1) @ v_BNSV


@dataclass(kw_only=True)
class WrittenOut:
    """All tokens that a prompt's logits depend on, in one sequence, whose last token is the prompt's last."""

    ids: list[int]
    positions: list[int]
    allowed_SS: Tensor


def written_out(prompt: ReusingPrompt, following: Sequence[int] = ()) -> WrittenOut:
    """A segment's tokens see it and what is in front of it; new ones see all that the prompt takes, and new ones."""
    prompt = replace(
        prompt,
        new_ids=(*prompt.new_ids, *following),
        new_positions=(*prompt.new_positions, *range(prompt.end, prompt.end + len(following))),
    )
    ids: list[int] = []
    positions: list[int] = []
    group: list[int] = []
    taken: list[bool] = []
    for number, use in enumerate(prompt.uses):
        segment = use.segment
        in_use = {segment.stored[index] for part in use.parts for index in part}
        ids += [*segment.context_ids, *segment.ids]
        positions += [*segment.context_positions, *segment.positions]
        group += [number] * (len(segment.context_ids) + len(segment.ids))
        taken += [False] * len(segment.context_ids) + [index in in_use for index in range(len(segment.ids))]
    new = len(prompt.uses)
    ids += prompt.new_ids
    positions += prompt.new_positions
    group += [new] * len(prompt.new_ids)
    taken += [True] * len(prompt.new_ids)
    at_S, group_S, taken_S = torch.tensor(positions), torch.tensor(group), torch.tensor(taken)
    earlier_SS = at_S[None, :] <= at_S[:, None]
    same_SS = group_S[None, :] == group_S[:, None]
    allowed_SS = earlier_SS & (same_SS | ((group_S == new)[:, None] & taken_S[None, :]))
    return WrittenOut(ids=ids, positions=positions, allowed_SS=allowed_SS)


def written_out_logits(model: Model, prompt: ReusingPrompt, following: Sequence[int] = ()) -> Tensor:
    """Logits (V) behind the last token."""
    written = written_out(prompt, following)
    attention = MaskedAttention(torch.tensor(written.positions), written.allowed_SS)
    with throughout(model.dtype):
        return model.forward(torch.tensor([written.ids]), attention, start=0, pads=[0])[0]


def serve_on_ranks(
    ranks: Ranks, family: str, prompts: list[ReusingPrompt], lengths: list[int], folder: str | None
) -> tuple[list[Tensor] | None, ReuseReport | None]:
    """For a pool of ranks: logits where there are some, and what was encoded here."""
    model = tiny_model(family)
    limits = StoreLimits(host_bytes=1 << 30)
    served = serve(
        model,
        prompts,
        store=SegmentStore(model, None if folder is None else Path(folder), limits),
        ranks=ranks,
        lengths=lengths,
        following=(5, 7),
    )
    return (None, None) if served is None else (served.logits, served.report)
