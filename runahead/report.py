"""Reports of a run: tokens, times and bytes as dataclasses, and as JSON."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from importlib import metadata
from typing import Any

from runahead.config import CacheOptions, GenerationOptions, PrefillOptions
from runahead.timeline.recording import ProfilerRecording
from runahead.timeline.trace import TraceSpan


@dataclass(kw_only=True)
class RetrievalReport:
    """Statistics of retrieval while decoding.

    Attributes:
        fetched_share: mean share of the stored slots that was fetched, by layer; None in layers that attend to
            everything.
        hit_mass: mean attention probability of the slots that attention saw in the sampled steps, by layer, or None.
        evicted: slots of each row and KV head that were dropped or replaced to stay within the pool's limit, by layer.
        host_bytes: bytes of the pool.
        chosen_again: share of the choices by the query of the token before that a KV head replaced by one by the
            token's own query, by layer; None in layers without such choices.
    """

    fetched_share: list[float | None]
    hit_mass: list[float | None]
    evicted: list[int]
    host_bytes: int
    chosen_again: list[float | None]

    @property
    def mean_fetched_share(self) -> float | None:
        """Mean of `fetched_share` over the layers that retrieve; None if none does."""
        return _mean_of_known(self.fetched_share)

    @property
    def mean_chosen_again(self) -> float | None:
        """Mean of `chosen_again` over the layers that choose late; None if none does."""
        return _mean_of_known(self.chosen_again)


def _mean_of_known(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


@dataclass(kw_only=True)
class SparseReport:
    """Shares of the keys that a rank's queries saw in the prefill, by layer; None in layers where they saw all, but for
    `prefill.exact_layers`, of which they are 1.

    Attributes:
        density: of xattention, blocks of keys that were chosen over those that queries could see; of streaming heads,
            keys that queries of all heads saw over those before them.
        covered: mean share of the attention that chosen blocks were expected to receive; None with streaming heads, as
            nothing expects it.
    """

    density: list[float | None]
    covered: list[float | None]

    @property
    def mean_density(self) -> float | None:
        """Mean over the layers that choose and exact ones; None if there are none."""
        return _mean_of_known(self.density)

    @property
    def mean_covered(self) -> float | None:
        """Mean over the layers that choose and exact ones; None if there are none."""
        return _mean_of_known(self.covered)


@dataclass(kw_only=True)
class ReuseReport:
    """Statistics of segment reuse on one rank in one call.

    Attributes:
        cached_tokens: reused tokens of all prompts of the batch.
        computed_tokens: tokens that this rank computed, at least in the first layers.
        recomputed_tokens: of these, tokens of segments that policy.recompute chose among, as a mean over the layers.
        found_bytes: bytes of the segments in use by the tier they were found in, once for all prompts of the batch.
        stored_bytes: bytes of all segments in the store, by tier.
        encoded_tokens, encode_s: tokens and time of encoding segments that were in no tier; TTFT does not include it.
        lookup_s: time of finding segments, and of beginning to copy them to the device and into faster tiers.
        copy_s: time of waiting for copies before the prefill, as for clusters. Attention waits for all others layer by
            layer, as part of `RankReport.prefill_s`.
        cluster_s: time of clustering the keys of segments for a policy that retrieves; TTFT includes it.
    """

    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: float = 0.0
    found_bytes: dict[str, int] = field(default_factory=dict)
    stored_bytes: dict[str, int] = field(default_factory=dict)
    encoded_tokens: int = 0
    encode_s: float = 0.0
    lookup_s: float = 0.0
    copy_s: float = 0.0
    cluster_s: float = 0.0


@dataclass(kw_only=True)
class SpeculationReport:
    """Statistics of speculative decoding.

    Attributes:
        drafts: what drafted.
        plain_steps, plain_s: decoding steps of one token per row, and their time.
        verifications, verify_s: forwards over drafts, and their time with the choice of tokens.
        draft_s: time of drafting.
        drafted, accepted: tokens of all drafts that were verified, and those of them that are new tokens.
        accepted_lengths: how many verified drafts had 0, 1, 2 ... accepted tokens.
        declined: steps in which a draft was not verified, as that was not expected to save time.
        off_after: new tokens of the longest row that was decoded, before the first of these; None if there was none.
        within: statistics of the drafts for the drafts, if the drafter has some.
    """

    drafts: str
    plain_steps: int = 0
    plain_s: float = 0.0
    verifications: int = 0
    verify_s: float = 0.0
    draft_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    declined: int = 0
    off_after: int | None = None
    within: SpeculationReport | None = None

    def add_plain(self, seconds: float) -> None:
        """Take a decoding step of one token per row."""
        self.plain_steps += 1
        self.plain_s += seconds

    def add_verification(self, lengths: Iterable[tuple[int, int]], seconds: float) -> None:
        """Take a verification: of each row, how many tokens were drafted and how many accepted."""
        self.verifications += 1
        self.verify_s += seconds
        for num_drafted, num in lengths:
            if num_drafted:
                self.drafted += num_drafted
                self.accepted += num
                self.accepted_lengths += [0] * (num + 1 - len(self.accepted_lengths))
                self.accepted_lengths[num] += 1

    @property
    def mean_accepted(self) -> float | None:
        """Mean number of accepted tokens of a draft; None if none was verified."""
        drafts = sum(self.accepted_lengths)
        return self.accepted / drafts if drafts else None


@dataclass(frozen=True, kw_only=True)
class SpeculativeReport:
    """Statistics of a speculative prefill.

    Attributes:
        draft: name of the model that chose.
        kept_tokens: of each prompt, tokens that were computed.
        draft_s: time of choosing them, part of TTFT.
    """

    draft: str
    kept_tokens: list[int]
    draft_s: float


@dataclass(kw_only=True)
class MemoryReport:
    """Memory of a rank's process: resident, or on a GPU what PyTorch allocates there.

    Attributes:
        base_bytes: before the weights are loaded; on a CPU Python and its libraries.
        weights_bytes: of the weights that the rank holds.
        load_peak_bytes: peak while the weights were loaded, with its prediction: base, weights, for a share of a model
            the largest whole tensor that a part is taken of, and mapped files of which copies are made.
        peak_bytes: peak from then until the end of a call, with its prediction: base, weights, the call's peak of KV
            cache and the largest activations, or the peak while loading if that is larger; 0 before any call.
    """

    base_bytes: int
    weights_bytes: int
    load_peak_bytes: int
    predicted_load_peak_bytes: int
    peak_bytes: int = 0
    predicted_peak_bytes: int = 0


@dataclass(kw_only=True)
class RankReport:
    """Report of one rank in one call. Bytes are those of the rank's own KV heads.

    Attributes:
        stage, share: place of the rank in the mesh; None where every rank is a stage.
        chunk_tokens: tokens that the rank computed.
        row_tokens: of these, most tokens of a row that a layer computed at a time; None is all.
        prefill_s: time until the rank's last layer ended.
        wait_s: part of `prefill_s` in which it waited for keys and values, and states.
        kv_sent_bytes, kv_received_bytes: bytes of keys and values sent and received, with states.
        kv_peak_bytes: most bytes of KV cache allocated at a time, with states and what of them is on its way.
        kv_kept_bytes: bytes of KV cache after the prompt, on a rank that decodes; without the pool in host memory of a
            retrieving policy, but with its indices.
        state_bytes: bytes of the rows' states, part of the two above, in a model with layers that hold states.
        kept_tokens: number of kept tokens by layer, under a cache policy or in fewer bits.
        attention: density and expected coverage by layer, where queries attend to some keys alone.
        kv_host_bytes: bytes of a retrieving policy's pool.
        retrieval: statistics of a retrieving policy.
        reuse: statistics of segment reuse.
        speculation: statistics of speculative decoding, on the rank that decodes.
        memory: of this rank's process, if it loaded the model itself.
    """

    rank: int
    stage: int | None = None
    share: int | None = None
    chunk_tokens: int = 0
    row_tokens: int | None = None
    prefill_s: float = 0.0
    wait_s: float = 0.0
    kv_sent_bytes: int = 0
    kv_received_bytes: int = 0
    kv_peak_bytes: int = 0
    kv_kept_bytes: int = 0
    state_bytes: int = 0
    kept_tokens: list[int] = field(default_factory=list)
    attention: SparseReport | None = None
    kv_host_bytes: int = 0
    retrieval: RetrievalReport | None = None
    reuse: ReuseReport | None = None
    speculation: SpeculationReport | None = None
    memory: MemoryReport | None = None


LEAST_LOGPROB = -9999.0
"""Given for tokens that are all but impossible, as in OpenAI's API: JSON has no infinity."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at the place of one new token, as natural logarithms: log-softmax of the model's logits.

    Attributes:
        logprob: of the new token.
        top: of the most likely tokens, as (token id, log-probability), the largest first.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of a prompt, each after all before it, as those of new tokens.

    Attributes:
        first: place of the first one in the prompt; no prompt's first token has one.
        logprobs: of these tokens.
        top_logprobs, top_ids: of the most likely tokens at each of their places, the largest first.
    """

    first: int
    logprobs: list[float]
    top_logprobs: list[list[float]]
    top_ids: list[list[int]]

    @classmethod
    def join(cls, parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """All of a prompt's tokens from those of its ranks, in any order."""
        parts, end = sorted(parts, key=lambda each: each.first), 1
        for each in parts:
            assert each.first == end, (each.first, end)
            end += len(each.logprobs)
        logprobs, top_logprobs, top_ids = (
            [value for each in parts for value in getattr(each, name)]
            for name in ("logprobs", "top_logprobs", "top_ids")
        )
        return cls(first=1, logprobs=logprobs, top_logprobs=top_logprobs, top_ids=top_ids)


@dataclass(kw_only=True)
class Generation:
    """Result of one prompt.

    Attributes:
        finish_reason: eos, stop or length.
        first_token_logits_top5: the largest raw logits of the first new token, as (token id, logit).
        logprobs: of each new token; None if they were not asked for.
    """

    prompt_tokens: int
    new_token_ids: list[int]
    text: str
    finish_reason: str
    first_token_logits_top5: list[tuple[int, float]]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(kw_only=True)
class GenerationBatch:
    """Result of one call of the engine. Its prompts ran as one batch and share times, boundaries and bytes.

    Attributes:
        boundaries: of the context partition.
        decode: where keys and values were while decoding: last, sharded, or pipeline: on each rank those of its layers.
        cached_tokens: of each prompt, tokens of a stored prefix, which was not computed.
        slower: a sentence for each faster way that was not taken, with the reason.
        no_room: a sentence for each policy whose share of the prompt had no room for its other options.
        ttft_s: time to first token.
        tpot_s: time per output token after the first; None if only one token was generated.
        step_s: the median of the times between tokens, of which the first ones prepare the others; None if there are
            none, or rows do more than to take the largest logit.
        warm: False for an engine's first call.
        spans: timeline of each rank; empty if none was recorded.
        recordings: of torch's profiler on each rank, on the clock of the spans; empty if there are none.
        speculative: statistics of a speculative prefill; None: all tokens were computed.
    """

    generations: list[Generation]
    boundaries: list[int]
    ttft_s: float
    tpot_s: float | None
    warm: bool
    ranks: list[RankReport]
    decode: str = "last"
    step_s: float | None = None
    cached_tokens: list[int] = field(default_factory=list)
    slower: list[str] = field(default_factory=list)
    no_room: list[str] = field(default_factory=list)
    spans: list[list[TraceSpan]] = field(default_factory=list)
    recordings: list[ProfilerRecording] = field(default_factory=list)
    speculative: SpeculativeReport | None = None

    @property
    def chunks(self) -> str:
        """Number of tokens by stage, as text."""
        stages = [rank.chunk_tokens for rank in self.ranks if not rank.share]
        if len(stages) == 1 < len(self.ranks):
            return f"all {stages[0]:,} tokens on every rank"
        shared = f", {len(self.ranks) // len(stages)} ranks each" if len(stages) < len(self.ranks) else ""
        return " + ".join(f"{length:,}" for length in stages) + f" tokens{shared}"


def report_json(
    batches: Sequence[GenerationBatch],
    *,
    prefill: PrefillOptions,
    partition: str,
    policy: Mapping[str, Any],
    cache: CacheOptions,
    generation: GenerationOptions,
    warmup: int,
    model: str,
    dtype: str,
    device: str,
    world_size: int,
    kvr_names: Sequence[str | None] = (),
    places: Sequence[int] = (),
    skipped: Mapping[int, str] | None = None,
    model_check: str = "done",
    weights: str = "",
) -> str:
    """The report of a run as JSON text.

    The fields of a single prompt are on the top level. With several prompts, the list `prompts` has the same fields for
    each, in order; prompts with the same `batch` ran together and share times and bytes.

    Args:
        partition: name of the context partition.
        policy: name and given options of the cache policy, as values that JSON supports.
        cache: precision of stored keys and values, reported if it is not the model's dtype.
        generation: as `GenerationOptions.resolved` returns it. A prompt samples by the seed + its
            number among those that are not skipped, from 0.
        warmup: number of runs before the measured ones.
        kvr_names: the paper's name of each batch's partition (KVR-E, KVR-S, KVR-P), or None.
        places: index of each prompt among all that were given, reported if some of these are not among the prompts.
        skipped: error of each prompt that was left out, by its index among all.
        model_check: whether the model's logits were compared with transformers' own, as `Model.check` says.
        weights: what was made of the stored ones, as `Model.weights_in_words` says; reported unless it is "".
    """
    kvr_names = kvr_names or [None] * len(batches)
    about_the_run: dict[str, Any] = {
        "world_size": world_size,
        "model": model,
        "dtype": dtype,
        **({"weights": weights} if weights else {}),
        "device": device,
        "policy": dict(policy),
        **({} if cache.bits is None and cache.tier_bits is None else {"cache": asdict(cache)}),
        "prefill": {"strategy": prefill.name.name, "transfer": prefill.transfer.name}
        | {
            name: value
            for name in ("chunk_tokens", "row_tokens", "wire_bits")
            if (value := getattr(prefill, name)) is not None
        }
        | prefill.sparsity,
        "generation": _generation_fields(generation),
        "warmup": warmup,
        "model_check": model_check,
        "versions": library_versions(),
    }
    prompts = [
        _prompt_fields(generation, batch, partition, kvr_name)
        | _speculative_fields(batch.speculative, row)
        | {"cached_tokens": cached, "batch": number}
        for number, (batch, kvr_name) in enumerate(zip(batches, kvr_names, strict=True))
        for row, (generation, cached) in enumerate(
            zip(batch.generations, batch.cached_tokens or [0] * len(batch.generations), strict=True)
        )
    ]
    if places:
        prompts = [{"index": place} | prompt for place, prompt in zip(places, prompts, strict=True)]
    if skipped:
        about_the_run["skipped"] = [{"index": place, "error": skipped[place]} for place in sorted(skipped)]
    report = about_the_run | {"prompts": prompts}
    if len(prompts) == 1:
        report = prompts[0] | report
        del report["batch"]
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    # Lists of numbers on one line. A newline in JSON is never inside a string.
    return re.sub(r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _generation_fields(options: GenerationOptions) -> dict[str, Any]:
    """Options of an answer: those that are not their defaults, and always how long it may be and how it is sampled."""
    given, usual = asdict(options), asdict(GenerationOptions())
    always = ["max_new_tokens", "do_sample"] + (["temperature", "seed"] if options.do_sample else [])
    changed = {name: value for name, value in given.items() if name in always or value != usual[name]}
    return {name: value.name if isinstance(value, Enum) else value for name, value in changed.items()}


def _prompt_fields(
    generation: Generation, batch: GenerationBatch, partition_name: str, kvr_name: str | None
) -> dict[str, Any]:
    """Fields of one prompt."""
    fields = asdict(generation)
    if generation.logprobs is None:
        del fields["logprobs"]
    # JSON has no NaN and no infinity, and a broken model should still get its report.
    top5 = [[token, logit if math.isfinite(logit) else None] for token, logit in fields.pop("first_token_logits_top5")]
    partition: dict[str, Any] = {"name": partition_name}
    if kvr_name is not None:
        partition["kvr"] = kvr_name
    return fields | {
        "ttft_s": batch.ttft_s,
        "tpot_s": batch.tpot_s,
        "warm": batch.warm,
        "partition": partition | {"boundaries": batch.boundaries},
        "decode": batch.decode,
        "slower": batch.slower,
        **({"no_room": batch.no_room} if batch.no_room else {}),
        "ranks": [_rank_fields(rank) for rank in batch.ranks],
        "first_token_logits_top5": top5,
    }


def _speculative_fields(report: SpeculativeReport | None, row: int) -> dict[str, Any]:
    """Fields of a prompt of which some tokens were computed."""
    if report is None:
        return {}
    about = {"draft": report.draft, "kept_tokens": report.kept_tokens[row], "draft_s": report.draft_s}
    return {"speculative": about}


def _rank_fields(rank: RankReport) -> dict[str, Any]:
    """Fields of one rank, without those of features that were not used."""
    rank_fields = asdict(rank)
    if rank.stage is None:
        del rank_fields["stage"], rank_fields["share"]
    if rank.row_tokens is None:
        del rank_fields["row_tokens"]
    if rank.reuse is None:
        del rank_fields["reuse"]
    if rank.speculation is None:
        del rank_fields["speculation"]
    if rank.memory is None:
        del rank_fields["memory"]
    if rank.attention is None:
        del rank_fields["attention"]
    if rank.retrieval is None:
        del rank_fields["retrieval"], rank_fields["kv_host_bytes"]
    return rank_fields


def library_versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that determine a run's results and speed."""
    packages = ("torch", "transformers", "runahead")  # the last is not installed where a checkout is run as it is
    return {"python": platform.python_version()} | {package: package_version(package) for package in packages}


def package_version(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
