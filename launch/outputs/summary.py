"""Summary of a run for standard error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_high

import torch

from runahead.config import DType
from runahead.ranks.devices import multiplies_bfloat16
from runahead.report import GenerationBatch, RankReport


def summary(
    batches: Sequence[GenerationBatch],
    *,
    skipped: Mapping[int, str] | None = None,
    dtype: str | None = None,
    weights: str = "",
) -> str:
    """Figures of a run, one per line: of several batches, medians of times, maxima of peaks, and what the longest kept.

    Args:
        skipped: for each prompt that was left out, by index, what is wrong with it.
        dtype: `dtype_hint`.
        weights: `Model.weights_in_words`.
    """
    first = batches[0]
    generations = [generation for batch in batches for generation in batch.generations]
    prompt_tokens = [generation.prompt_tokens for generation in generations]
    new_tokens = sum(len(generation.new_token_ids) for generation in generations)
    rows: dict[str, str] = {}
    end = ""
    if len(generations) == 1:
        rows["prompt tokens"] = f"{prompt_tokens[0]:,}"
        end = f" ({generations[0].finish_reason})"
    else:
        span = f"{min(prompt_tokens):,} to {max(prompt_tokens):,}"
        rows["prompts"] = f"{len(generations):,} in {len(batches):,} calls, {span} tokens each"
    if skipped:
        rows["skipped"] = f"{len(skipped):,}; the first: {skipped[min(skipped)]}"
    rows["new tokens"] = f"{new_tokens:,}{end}"
    num_ranks, num_shares = len(first.ranks), 1 + max(rank.share or 0 for rank in first.ranks)
    stages = "" if num_shares == 1 else f", {num_ranks // num_shares} x {num_shares} that share a model"
    rows["ranks"] = f"{num_ranks}{stages}"
    if weights:
        rows["weights"] = weights
    if dtype is not None:
        rows["dtype"] = dtype
    widest = max(batches, key=lambda batch: batch.boundaries[-1])
    of_which = " (longest prompt)" if len(batches) > 1 else ""
    rows["chunks"] = widest.chunks + of_which
    rows |= _speculative_rows(batches)
    rows["TTFT"] = _times([(batch.ttft_s, batch.warm) for batch in batches])
    tpots = [batch.tpot_s for batch in batches if batch.tpot_s is not None]
    rows["TPOT"] = f"{median_high(tpots) * 1e3:.1f} ms" if tpots else "- (one new token)"
    moved = sum(rank.kv_sent_bytes for batch in batches for rank in batch.ranks)
    if any(batch.decode == "sharded" for batch in batches):
        rows["decoding"] = "sharded: each rank attends to its own keys and values"
    in_layers = first.decode == "pipeline"
    if in_layers:
        rows["decoding"] = "pipeline: each rank computes its own layers"
    rows["hidden states moved" if in_layers else "KV moved"] = _bytes(moved)
    peaks = [max(batch.ranks[rank].kv_peak_bytes for batch in batches) for rank in range(len(first.ranks))]
    rows["KV peak per rank"] = ", ".join(_bytes(peak) for peak in peaks)
    retrieving = [rank for rank in widest.ranks if rank.retrieval and not rank.share]
    kept = [rank for rank in widest.ranks if rank.kept_tokens and not rank.share]
    if kept:
        if widest.decode != "sharded":
            kept = [max(kept, key=lambda rank: sum(rank.kept_tokens))]
        longest = max(generation.prompt_tokens for generation in widest.generations)
        share = sum(sum(rank.kept_tokens) for rank in kept) / len(kept[0].kept_tokens) / longest
        num_bytes = ", ".join(_bytes(_of_stage(widest, rank, "kv_kept_bytes")) for rank in kept)
        beside = " of indices and layers that do not retrieve" if retrieving else ""
        rows["KV kept"] = f"{num_bytes}{beside}, {share:.1%} of the prompt's tokens, mean over layers{of_which}"
    shortest = min(batches, key=lambda batch: batch.boundaries[-1])
    if shortest.no_room:
        rows["no room"] = "; ".join(shortest.no_room) + (" (shortest prompt)" if len(batches) > 1 else "")
    if retrieving:
        means = [rank.retrieval.mean_fetched_share for rank in retrieving if rank.retrieval]
        shares = ", ".join(f"{mean:.1%}" for mean in means if mean is not None)
        fetched = f"{shares} of the tokens fetched per step and layer" if shares else "every step read all tokens"
        fetched = fetched if widest.tpot_s is not None else "no step read any"
        num_bytes = ", ".join(_bytes(_of_stage(widest, rank, "kv_host_bytes")) for rank in retrieving)
        rows["KV in host memory"] = f"{num_bytes}; {fetched}{of_which}"
    again = [rank.retrieval.mean_chosen_again for rank in widest.ranks if rank.retrieval]
    late = [share for share in again if share is not None]
    if late:
        rows["late choices"] = f"{sum(late) / len(late):.1%} made again by a token's own query"
    rows |= _reuse_rows(batches)
    rows |= _speculation_rows(batches)
    width = max(map(len, rows))
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows.items())


def _of_stage(batch: GenerationBatch, rank: RankReport, field: str) -> int:
    """Bytes of all ranks that share a model with this one: each has some of the heads."""
    shares = [each for each in batch.ranks if each is rank or (rank.stage is not None and each.stage == rank.stage)]
    return sum(getattr(each, field) for each in shares)


def dtype_hint(asked: DType, dtype: torch.dtype, device: torch.device) -> str | None:
    """A hint where model.dtype=auto leaves bfloat16 instructions of a processor unused; None elsewhere.

    The checkpoint's dtype stays the default: bfloat16 has 8 bits of precision, so other tokens may be chosen.
    """
    if asked is not DType.auto or dtype is not torch.float32 or not multiplies_bfloat16(device):
        return None
    return "float32 (auto); model.dtype=bfloat16 is faster on this processor, and less precise"


def _speculative_rows(batches: Sequence[GenerationBatch]) -> dict[str, str]:
    """The tokens of the prompts that speculative prefills have computed."""
    reports = [batch.speculative for batch in batches if batch.speculative is not None]
    if not reports:
        return {}
    kept = sum(sum(report.kept_tokens) for report in reports)
    total = sum(generation.prompt_tokens for batch in batches for generation in batch.generations)
    draft_s = sum(report.draft_s for report in reports)
    return {"prompt kept": f"{kept:,} of {total:,} tokens, chosen in {draft_s:.3f} s by {reports[0].draft}"}


def _reuse_rows(batches: Sequence[GenerationBatch]) -> dict[str, str]:
    """Reuse of cached segments, as reported by the rank that reused most."""
    by_batch = [[rank.reuse for rank in batch.ranks if rank.reuse is not None] for batch in batches]
    reports = [max(of_ranks, key=lambda report: report.cached_tokens) for of_ranks in by_batch if of_ranks]
    if not reports:
        return {}
    cached = sum(report.cached_tokens for report in reports)
    total = sum(generation.prompt_tokens for batch in batches for generation in batch.generations)
    found: Counter[str] = Counter()
    for report in reports:
        found.update(report.found_bytes)
    tiers = ", ".join(f"{_bytes(count)} from {tier}" for tier, count in found.items())
    rows = {"tokens reused": f"{cached:,} of {total:,} ({cached / total:.1%}){': ' if tiers else ''}{tiers}"}
    encoded = [sum(report.encoded_tokens for report in of_ranks) for of_ranks in by_batch]
    if any(encoded):
        seconds = sum(max(report.encode_s for report in of_ranks) for of_ranks in by_batch if of_ranks)
        rows["tokens encoded"] = f"{sum(encoded):,} in {seconds:.2f} s, before TTFT begins"
    cluster_s = sum(max(report.cluster_s for report in of_ranks) for of_ranks in by_batch if of_ranks)
    if cluster_s:
        rows["keys clustered"] = f"in {cluster_s:.2f} s of TTFT, once for each module"
    return rows


def _speculation_rows(batches: Sequence[GenerationBatch]) -> dict[str, str]:
    """Statistics of drafts, over all batches."""
    reports = [rank.speculation for batch in batches for rank in batch.ranks if rank.speculation is not None]
    if not reports:
        return {}
    drafted, accepted = (sum(getattr(report, name) for report in reports) for name in ("drafted", "accepted"))
    drafts = sum(sum(report.accepted_lengths) for report in reports)
    text = f"{reports[0].drafts}: no draft was verified"
    if drafts:
        mean = f"{accepted / drafts:.1f} per draft"
        text = f"{reports[0].drafts}: {accepted:,} of {drafted:,} drafted tokens accepted, {mean}"
    if declined := sum(report.declined for report in reports):
        first = min(report.off_after for report in reports if report.off_after is not None)
        text += f"; {declined:,} drafts left out as they would not pay, the first after {first:,} new tokens"
    within = [report.within for report in reports if report.within is not None]
    if drafted := sum(report.drafted for report in within):
        accepted = sum(report.accepted for report in within)
        text += f"; of these drafts {accepted:,} of {drafted:,} tokens by {within[0].drafts}"
    draft_s, verify_s, plain_s = (
        sum(getattr(report, name) for report in reports) for name in ("draft_s", "verify_s", "plain_s")
    )
    times = f"{draft_s:.2f} s drafting, {verify_s:.2f} s verifying, {plain_s:.2f} s in steps of one token"
    return {"speculation": text, "decoding time": times}


def _times(ttfts: Sequence[tuple[float, bool]]) -> str:
    parts = []
    for word, wanted in (("cold", False), ("warm", True)):
        chosen = [ttft for ttft, warm in ttfts if warm is wanted]
        if chosen:
            kind = word if len(chosen) == 1 else f"{word}, median of {len(chosen)}"
            parts.append(f"{median_high(chosen):.3f} s ({kind})")
    return ", ".join(parts)


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
