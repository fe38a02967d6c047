"""Learns from the times of a finished prefill: for the estimate of later ones, and for a partitioner that learns."""

from __future__ import annotations

from runahead.context import ContextPartition
from runahead.serving.batch import Batch
from runahead.serving.estimate import WAITING, PrefillTimes, TimeEstimate
from runahead.serving.items import PrefillItem

Lesson = tuple[ContextPartition, dict[int, tuple[float, float]]]
"""The chunks of a prompt, and the seconds of each rank in its prefill and in waiting, as `Engine.learn` takes them."""


def learn_prefill(batch: Batch, estimate: TimeEstimate, times: PrefillTimes) -> Lesson | None:
    """Take in the times of a prefill of which all ranks have reported their parts.

    Args:
        times: of `estimate`, those of such prefills.

    Returns:
        None if the times of its ranks say nothing of whole prompts.
    """
    # The rank with the first token ends last, but what it decoded in its waits does not count.
    if batch.scores:  # which is more work
        return None
    longest_s = max(each.prefill_s for each in batch.parts.values())
    is_alone = batch.is_alone and all(each.is_alone for each in batch.parts.values())
    if isinstance(batch.item, PrefillItem) and any(batch.item.stored):
        _learn_rest(batch, estimate, longest_s, is_alone=is_alone)
        return None
    if not batch.reuses:
        times.learn_served(batch.of_computed(batch.lengths), longest_s, batch.of_computed(batch.cached))
    is_alone = is_alone and not batch.reuses and not any(batch.cached)
    if not (isinstance(batch.item, PrefillItem) and is_alone and not batch.is_short):
        return None
    parts, num_rows = batch.parts, len(batch.computed)
    seconds = {rank: (each.prefill_s / num_rows, each.wait_s / num_rows) for rank, each in parts.items()}
    return ContextPartition(boundaries=batch.item.boundaries), seconds


def _learn_rest(batch: Batch, estimate: TimeEstimate, seconds: float, *, is_alone: bool) -> None:
    """Take in the times of prompts that all stages computed after stored prefixes.

    Args:
        is_alone: no rank did anything else meanwhile.
    """
    first = batch.parts[0]
    num_bytes = 0 if first.report is None else first.report.kv_received_bytes
    if is_alone and num_bytes:
        estimate.learn_transfer(num_bytes, first.prefill_s, first.wait_s)
    assert isinstance(batch.item, PrefillItem)
    if not batch.item.boundaries[1]:  # so short a rest that later stages have computed it without the first one
        return
    if batch.cached == list(batch.item.stored) and first.wait_s <= WAITING * first.prefill_s:
        estimate.chain.learn_served(batch.of_computed(batch.lengths), seconds, batch.of_computed(batch.cached))
