"""Decoding of one batch on this rank: from the logits of its prompts to rows that have ended."""

from __future__ import annotations

from collections.abc import Sequence

from runahead.config import GenerationOptions
from runahead.decoding.forward import fastest_form, forward_over
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, batch_ids
from runahead.decoding.rows import Decoded, choose_alone, decode
from runahead.decoding.speculative.proposals import PayingDrafts
from runahead.decoding.speculative.speculator import Speculator
from runahead.decoding.together import choose_together
from runahead.decoding.token_stream import TokenStream
from runahead.kv_transfer.gathering import Gathering
from runahead.model.model import Model
from runahead.prefill.base import Prefilled, PromptBatch
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
    """
    if prefilled.cache is None:
        return None
    rows = [Row(model, prompt, each, seed=seed) for prompt, (each, seed) in zip(prompts, options, strict=True)]
    report, pads, num_tokens = prefilled.report, batch.pads, batch.num_tokens

    def hold() -> tuple[Lanes, PayingDrafts | None]:
        cache, may_draft = prefilled.cache, any(row.asks_for_drafts for row in rows)
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
        lanes = Lanes.holding(
            model,
            batch_ids(len(rows)),
            cache,
            forward,
            pads=pads,
            num_tokens=num_tokens,
            deciding=policies.while_decoding,
            is_told=is_told,
        )
        if not may_draft:
            return lanes, None
        token_s = report.prefill_s / max(1, report.chunk_tokens * len(rows))
        return lanes, speculator.drafts(rows, lanes, token_s=token_s, gather=gather)

    choose = choose_alone if gather is None else choose_together(gather)
    decoded = decode(rows, prefilled.logits_BV, hold, choose=choose, on_step=stream.send)
    prefilled.cache.describe_decoding(report)
    if decoded.drafts is not None:
        report.speculation = decoded.drafts.report
        report.kv_peak_bytes = max(report.kv_peak_bytes, decoded.num_bytes)  # rows may have grown apart
        report.kv_peak_bytes += decoded.drafts.drafter.num_bytes
    return decoded
