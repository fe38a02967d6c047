"""Decoding of one batch on this rank: from the logits of its prompts to rows that have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from runahead.config import GenerationOptions
from runahead.decoding.forward import fastest_form, forward_over
from runahead.decoding.lanes import Lane, Lanes
from runahead.decoding.row import Row, RowId, batch_ids
from runahead.decoding.rows import Decoded, choose_alone, decode
from runahead.decoding.speculative.proposals import PayingDrafts
from runahead.decoding.speculative.speculator import Speculator
from runahead.decoding.together import choose_together
from runahead.decoding.token_stream import TokenStream
from runahead.kv_transfer.gathering import Gathering
from runahead.model.model import Model
from runahead.prefill.base import Prefilled, PrefillJob, PromptBatch
from runahead.thinning.rank_policies import RankPolicies


def decode_batch(
    model: Model,
    prompts: Sequence[list[int]],
    options: Sequence[tuple[GenerationOptions, int]],
    prefilled: Prefilled,
    batch: PromptBatch,
    *,
    policies: RankPolicies,
    speculator: Speculator,
    stream: TokenStream,
    gather: Gathering | None,
    again: Callable[[list[list[int]], int], tuple[PrefillJob, Prefilled]],
) -> Decoded | None:
    """Generate all tokens, on the ranks that have a KV cache; None on the others.

    The first tokens are chosen and sent before the cache takes the form for decoding.

    Args:
        options: of each row, with its seed.
        batch: the prompts, as they lie in the cache.
        policies: of this rank.
        speculator: makes the drafts of rows that ask for them.
        stream: takes the tokens of each step.
        gather: between the ranks that decode together, if there are several.
        again: computes texts to which so many tokens may still come, on the ranks that decode them.
    """
    if prefilled.cache is None:
        return None
    report, may_draft = prefilled.report, any(each.asks_for_drafts for each, _ in options)
    parts = None if model.boundary is not None else gather  # stages of layers have no parts to be merged
    rows = [Row(model, prompt, each, seed=seed) for prompt, (each, seed) in zip(prompts, options, strict=True)]

    def hold() -> tuple[Lanes, PayingDrafts | None]:
        lanes = _lanes(model, batch_ids(len(rows)), prefilled, batch, policies, parts, may_draft=may_draft)
        if not may_draft:
            return lanes, None
        token_s = report.prefill_s / max(1, report.chunk_tokens * len(rows))
        return lanes, speculator.drafts(rows, lanes, token_s=token_s, gather=gather)

    def anew(lanes: Lanes, others: Mapping[RowId, Row]) -> tuple[Tensor | None, Lanes]:
        assert prefilled.cache is not None
        prefilled.cache.describe_decoding(report)
        prefilled.cache = None  # whose memory is free then
        lanes.release()
        job, done = again([row.ids for row in others.values()], max(row.num_left for row in others.values()))
        prefilled.cache = done.cache
        report.kv_peak_bytes = max(report.kv_peak_bytes, done.report.kv_peak_bytes)
        held = _lanes(model, list(others), prefilled, job.batch, job.own_policies, parts, may_draft=may_draft)
        return done.logits_BV, held

    def keep_states(id: RowId, row: Row, lane: Lane) -> None:
        if prefilled.prefixes and not policies:  # else answers are not stored
            prefilled.prefixes[id[1]].note_states(lane.num_after_prefix, lane.states)

    choose = choose_alone if gather is None else choose_together(gather)
    decoded = decode(
        rows, prefilled.logits_BV, hold, choose=choose, anew=anew, on_step=stream.send, on_leave=keep_states
    )
    prefilled.cache.describe_decoding(report)
    if decoded.drafts is not None:
        report.speculation = decoded.drafts.report
        report.kv_peak_bytes = max(report.kv_peak_bytes, decoded.num_bytes)  # rows may have grown apart
        report.kv_peak_bytes += decoded.drafts.drafter.num_bytes
    return decoded


def _lanes(
    model: Model,
    ids: Sequence[RowId],
    prefilled: Prefilled,
    batch: PromptBatch,
    policies: RankPolicies,
    gather: Gathering | None,
    *,
    may_draft: bool,
) -> Lanes:
    """The rows of a batch after their prefill, whose cache takes the form in which they are decoded fastest."""
    cache, pads, num_tokens = prefilled.cache, batch.pads, batch.num_tokens
    assert cache is not None
    if policies.while_decoding:
        cache = cache.for_decoding()
    else:
        cache = fastest_form(cache, model, pads=pads, num_tokens=num_tokens, apart=may_draft)
    if gather is not None:
        cache = cache.over_ranks(gather)
    prefilled.cache, is_told = cache, gather is not None and not gather.is_last
    forward = forward_over(
        model,
        cache,
        policies.while_decoding,
        pads=pads,
        prompt_tokens=num_tokens,
        is_told=is_told,
        part=policies.part,
    )
    return Lanes.holding(
        model,
        ids,
        cache,
        forward,
        pads=pads,
        num_tokens=num_tokens,
        deciding=policies.while_decoding,
        is_told=is_told,
    )
