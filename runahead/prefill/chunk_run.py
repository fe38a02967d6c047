"""One rank's forward over its tokens, from the embedding to what is known of it: bytes, seconds and spans."""

# Legend: B batch, C tokens of this rank.

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Protocol

import torch

from runahead.cache.slabs import KVCache
from runahead.kv_transfer import KVTransfer
from runahead.model.model import PrefillEndsHere
from runahead.model.new_tokens import NewTokens
from runahead.model.seam import LayerAttention
from runahead.prefill.base import Prefilled, PrefillJob
from runahead.timeline.clock import Clock
from runahead.timeline.span import Span


class TimedAttention(LayerAttention, Protocol):
    """Attention that exchanges K,V with other ranks and notes when each layer ended; the first mark is the start."""

    cache: KVCache
    transfer: KVTransfer
    layer_ends: list[object]


def run_chunk(
    job: PrefillJob,
    attention: TimedAttention,
    clock: Clock,
    runs: Sequence[range],
    *,
    began_s: float,
    tokens: NewTokens | None = None,
) -> Prefilled:
    """Compute the tokens of `runs`, contiguous ones each, in order.

    Args:
        began_s: when this rank's part began.
        tokens: the same tokens, if policies narrow them.
    """
    cache, transfer, ids_BS = attention.cache, attention.transfer, job.batch.ids_BS
    start, index_C = runs[0].start, None
    if len(runs) == 1:
        ids_BC = ids_BS[:, start : runs[0].stop]
    else:
        index_C = torch.cat([torch.arange(run.start, run.stop, device=ids_BS.device) for run in runs])
        ids_BC = ids_BS[:, index_C]
    logits_BV = None
    with suppress(PrefillEndsHere):
        logits_BV = job.model.forward(
            ids_BC,
            attention,
            start=start,
            pads=job.batch.pads,
            length=job.batch.num_tokens,
            index_C=index_C,
            tokens=tokens,
        )
    computed = clock.mark()
    transfer.finish()
    computed_s = clock.seconds(computed)
    log, is_last = transfer.log, transfer.schedule.is_last
    waits = [(clock.seconds(begin), clock.seconds(end)) for _, begin, end in log.waits]
    result = Prefilled(
        logits_BV=logits_BV,
        cache=cache if is_last else None,
        chunk_tokens=sum(map(len, runs)),
        prefill_s=computed_s - began_s,
        wait_s=sum(end_s - begin_s for begin_s, end_s in waits if begin_s < computed_s),
        kv_sent_bytes=log.sent_bytes,
        kv_received_bytes=log.received_bytes,
        kv_peak_bytes=cache.num_bytes,
        kv_kept_bytes=cache.num_bytes if is_last else 0,
    )
    if job.record:
        result.spans = _spans(attention, clock, computed_s)
    return result


def _spans(attention: TimedAttention, clock: Clock, computed_s: float) -> list[Span]:
    """A layer's compute runs from the end of the attention before it to the end of its own, less the waiting."""
    transfer = attention.transfer
    ends = [clock.seconds(mark) for mark in attention.layer_ends]
    layers = list(pairwise([*ends, computed_s]))
    names = {len(layers) - 1: "last MLP and logits"} if transfer.schedule.is_last else {}
    spans = []
    for layer, (start, end) in enumerate(layers):
        waits = [(clock.seconds(b), clock.seconds(e)) for at, b, e in transfer.log.waits if at == layer]
        waits = [(b, e) for b, e in waits if e <= end]  # what comes after is the wait for the last sends
        edges = [start, *(moment for wait in waits for moment in wait), end]
        spans += [
            Span(
                kind="compute",
                layer=None if layer in names else layer,
                start_s=b,
                end_s=e,
                detail=names.get(layer, ""),
            )
            for b, e in zip(edges[::2], edges[1::2], strict=True)
        ]
        spans += [Span(kind="wait", layer=layer, start_s=b, end_s=e, detail="K,V") for b, e in waits]
    for layer, begin, done, detail in transfer.log.sends:
        spans.append(
            Span(
                kind="send",
                layer=layer,
                start_s=clock.seconds(begin),
                end_s=clock.seconds(done),
                detail=detail,
            )
        )
    return spans
