"""The result of a generation: what all ranks report, gathered on every one."""

from __future__ import annotations

import torch

from runahead.decoding.rows import Decoded
from runahead.prefill.base import Prefilled
from runahead.ranks.ranks import Ranks
from runahead.report import Generation, GenerationBatch
from runahead.timeline.recording import ProfilerRecording


def gathered_result(
    ranks: Ranks,
    prefilled: Prefilled,
    decoded: Decoded | None,
    *,
    boundaries: tuple[int, ...],
    began_s: float,
    offset_s: float,
    source: int,
    is_warm: bool,
    recording: ProfilerRecording | None = None,
) -> GenerationBatch:
    """Gather the reports of all ranks and the generations of rank `source` into one result, on every rank.

    Args:
        prefilled, decoded: of this rank; it may have decoded nothing.
        boundaries: of the context partition.
        began_s: `time.perf_counter` of this rank when the prefill began.
        offset_s: seconds to add to it to get rank 0's.
        source: the rank whose generations the result has.
        is_warm: this is not the engine's first call.
        recording: of torch's profiler on this rank, on its clock.
    """
    outcome = None
    if decoded is not None and prefilled.logits_BV is not None:
        tpot_s = None
        if decoded.num_steps > 1:
            tpot_s = (decoded.last_token_s - decoded.first_token_s) / (decoded.num_steps - 1)
        generations = [
            Generation(
                prompt_tokens=len(row.prompt),
                new_token_ids=row.new_ids,
                text=row.text,
                finish_reason=row.finish_reason or "length",
                first_token_logits_top5=_top5(logits_V),
                logprobs=row.logprobs or None,
            )
            for row, logits_V in zip(decoded.rows, prefilled.logits_BV, strict=True)
        ]
        outcome = generations, decoded.first_token_s - began_s, tpot_s, decoded.step_s
    shared = ranks.gather(
        (
            prefilled.report,
            outcome,
            began_s + offset_s,
            [span.shifted(offset_s) for span in prefilled.spans],
            None if recording is None else recording.shifted(offset_s),
        ),
        "the end of the generation",
    )
    reports, outcomes, began, spans, recordings = (list(column) for column in zip(*shared, strict=True))
    for report in reports if ranks.num_shares > 1 else ():
        report.stage, report.share = ranks.mesh.stage(report.rank), ranks.mesh.share(report.rank)
    generations, ttft_s, tpot_s, step_s = outcomes[source]
    return GenerationBatch(
        generations=generations,
        boundaries=list(boundaries),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        step_s=step_s,
        warm=is_warm,
        ranks=reports,
        spans=[[span.shifted(-began[source]) for span in of_rank] for of_rank in spans] if any(spans) else [],
        recordings=[each.shifted(-began[source]) for each in recordings if each is not None],
    )


def _top5(logits_V: torch.Tensor) -> list[tuple[int, float]]:
    """The five largest logits, as (token id, logit)."""
    values, ids = logits_V.topk(min(5, len(logits_V)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))
