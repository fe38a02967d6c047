"""What a run found out: tokens, times and bytes, and the JSON that is made of them."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from runahead.config import PrefillOptions
from runahead.files import ensure_writable, write_whole
from runahead.timeline.span import Span

__all__ = ["Generation", "GenerationBatch", "RankReport", "ensure_writable", "report_json", "write_whole"]


@dataclass(kw_only=True)
class RetrievalReport:
    """What was retrieved while decoding, layer by layer; None in layers that attend to everything.

    `fetched_share` is the mean share of the stored slots, `hit_mass` the mean attention probability of what attention
    saw, in the steps that were sampled. `evicted` slots of each row and KV head were given up to stay within the pool's
    limit. `host_bytes` are those of the pool.
    """

    fetched_share: list[float | None]
    hit_mass: list[float | None]
    evicted: list[int]
    host_bytes: int

    @property
    def mean_fetched_share(self) -> float | None:
        """Over the layers that retrieve."""
        shares = [share for share in self.fetched_share if share is not None]
        return sum(shares) / len(shares) if shares else None


@dataclass(kw_only=True)
class ReuseReport:
    """What one rank reused in one call: tokens of all prompts of the batch, bytes by the tier that they were found in.

    Attributes:
        cached_tokens, computed_tokens: of the prompts; with several ranks, those that this rank computed.
        found_bytes: by tier, once for all prompts of the batch.
        stored_bytes: by tier, of everything in the store.
        encoded_tokens, encode_s: of segments that were in no tier, before the first token's time starts.
        lookup_s: of finding segments, with the copies into faster tiers.
        copy_s: of bringing them to the device, for this call; none where they are read where they lie. Compute is
            `RankReport.prefill_s`.
    """

    cached_tokens: int = 0
    computed_tokens: int = 0
    found_bytes: dict[str, int] = field(default_factory=dict)
    stored_bytes: dict[str, int] = field(default_factory=dict)
    encoded_tokens: int = 0
    encode_s: float = 0.0
    lookup_s: float = 0.0
    copy_s: float = 0.0


@dataclass(kw_only=True)
class RankReport:
    """One rank's part of one call.

    Attributes:
        chunk_tokens: tokens that the rank computed.
        prefill_s: until its last layer ended; for `wait_s` of that it waited for keys and values.
        kv_peak_bytes: the most that were allocated at a time.
        kv_kept_bytes: stored for decoding, after the prompt; under a policy that retrieves, only what is kept to find
            tokens in the host's pool, which has `kv_host_bytes`.
        kept_tokens: tokens that are kept in each layer, where a cache policy decides.
        reuse: where prompts reuse segments.
    """

    rank: int
    chunk_tokens: int = 0
    prefill_s: float = 0.0
    wait_s: float = 0.0
    kv_sent_bytes: int = 0
    kv_received_bytes: int = 0
    kv_peak_bytes: int = 0
    kv_kept_bytes: int = 0
    kept_tokens: list[int] = field(default_factory=list)
    kv_host_bytes: int = 0
    retrieval: RetrievalReport | None = None
    reuse: ReuseReport | None = None


@dataclass(kw_only=True)
class Generation:
    """What one prompt led to.

    `finish_reason` is eos, stop or length; the logits are the raw ones behind the first new token.
    """

    prompt_tokens: int
    new_token_ids: list[int]
    text: str
    finish_reason: str
    first_token_logits_top5: list[tuple[int, float]]


@dataclass(kw_only=True)
class GenerationBatch:
    """One call of the engine. Its prompts ran together: times, boundaries and bytes are the call's.

    `boundaries` are the context partition, `tpot_s` is None if only one token was generated, and `warm` is
    False for an engine's first call. `spans` holds one list per rank, or nothing if no timeline was asked
    for.
    """

    generations: list[Generation]
    boundaries: list[int]
    ttft_s: float
    tpot_s: float | None
    warm: bool
    ranks: list[RankReport]
    spans: list[list[Span]] = field(default_factory=list)

    @property
    def chunks(self) -> str:
        """Tokens by rank, for readers."""
        lengths = [rank.chunk_tokens for rank in self.ranks]
        if len(lengths) > 1 and min(lengths) == self.boundaries[-1]:
            return f"all {lengths[0]:,} tokens on every rank"
        return " + ".join(f"{length:,}" for length in lengths) + " tokens"


def report_json(
    batches: Sequence[GenerationBatch],
    *,
    prefill: PrefillOptions,
    partition: str,
    policy: Mapping[str, Any],
    warmup: int,
    model: str,
    dtype: str,
    device: str,
    world_size: int,
    kvr_names: Sequence[str | None] = (),
    skipped: Mapping[int, str] | None = None,
) -> str:
    """The report of a run as JSON text.

    One prompt: its fields are on the top level. Several prompts: the list `prompts` has the same fields for
    each, in order, and `batch` tells which of them ran together and share their times and bytes.

    Args:
        partition: name of the way in which prompts were split.
        policy: name and given options of the cache policy, as JSON can hold them.
        warmup: runs before the measured ones.
        kvr_names: what the paper calls each batch's partition (KVR-E, KVR-S, KVR-P), None if it has no name for it.
        skipped: prompts that were left out: place among all, and what is wrong with them. If there are any, each
            prompt has its place, too.
    """
    kvr_names = kvr_names or [None] * len(batches)
    about_the_run: dict[str, Any] = {
        "world_size": world_size,
        "model": model,
        "dtype": dtype,
        "device": device,
        "policy": dict(policy),
        "prefill": {"strategy": prefill.name.name, "transfer": prefill.transfer.name}
        | ({} if prefill.chunk_tokens is None else {"chunk_tokens": prefill.chunk_tokens}),
        "warmup": warmup,
        "versions": library_versions(),
    }
    prompts = [
        _prompt_fields(generation, batch, partition, kvr_name) | {"batch": number}
        for number, (batch, kvr_name) in enumerate(zip(batches, kvr_names, strict=True))
        for generation in batch.generations
    ]
    if skipped:
        places = (place for place in range(len(prompts) + len(skipped)) if place not in skipped)
        prompts = [{"index": place} | prompt for place, prompt in zip(places, prompts, strict=True)]
        about_the_run["skipped"] = [{"index": place, "error": skipped[place]} for place in sorted(skipped)]
    report = about_the_run | {"prompts": prompts}
    if len(prompts) == 1:
        report = prompts[0] | report
        del report["batch"]
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    # Lists of numbers on one line. A newline in JSON is never inside a string.
    return re.sub(r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _prompt_fields(
    generation: Generation, batch: GenerationBatch, partition_name: str, kvr_name: str | None
) -> dict[str, Any]:
    # JSON has no NaN and no infinity, and a broken model should still get its report.
    top5 = [[token, logit if math.isfinite(logit) else None] for token, logit in generation.first_token_logits_top5]
    partition: dict[str, Any] = {"name": partition_name}
    if kvr_name is not None:
        partition["kvr"] = kvr_name
    return {
        "prompt_tokens": generation.prompt_tokens,
        "new_token_ids": generation.new_token_ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "ttft_s": batch.ttft_s,
        "tpot_s": batch.tpot_s,
        "warm": batch.warm,
        "partition": partition | {"boundaries": batch.boundaries},
        "ranks": [_rank_fields(rank) for rank in batch.ranks],
        "first_token_logits_top5": top5,
    }


def _rank_fields(rank: RankReport) -> dict[str, Any]:
    rank_fields = asdict(rank)
    if rank.reuse is None:
        del rank_fields["reuse"]
    if rank.retrieval is None:
        del rank_fields["retrieval"], rank_fields["kv_host_bytes"]
    return rank_fields


def library_versions() -> dict[str, str | None]:
    """Of Python and of the libraries that decide what a run computes, and how fast."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "runahead"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a checkout that was never installed
            versions[package] = None
    return versions
