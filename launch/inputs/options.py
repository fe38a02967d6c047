"""Options of launch/infer.py that the runtime does not take: prompt, partition, policy, and the run as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from launch.inputs.policies import checked, chooses, ineffective_options, named, names_of, rank_policies
from runahead.config import (
    Backend,
    CacheOptions,
    DecodeName,
    DecodeOptions,
    Device,
    GenerationOptions,
    ModelName,
    ModelOptions,
    Positions,
    PrefillName,
    PrefillOptions,
    Profile,
    RanksOptions,
    Speculate,
    Speculative,
    choice,
    require,
)
from runahead.features.refused import check
from runahead.features.setup import Setup

MAX_RANDOM_TOKENS = 2**27
"""Limit of random tokens, beyond the context of any model."""


AUTO = "auto"
"""Size of a prefix tree that has what prompts and answers leave unused of their memory."""


class Chat(Enum):
    auto = "auto"
    true = "true"
    false = "false"


class PartitionName(Enum):
    auto = "auto"
    even = "even"
    ratios = "ratios"
    table = "table"


def require_tree_size(option: str, size: int | str) -> None:
    """Check the size of a prefix tree. Raises: ValueError."""
    is_size = size == AUTO if isinstance(size, str) else size >= 0
    require(is_size, option, size, "must be a number of bytes, or auto; 0 keeps no prefixes")


@dataclass(kw_only=True)
class PromptOptions:
    """Source of the prompts: text, file, ids_file or random_tokens.

    Attributes:
        chat_template: file with a chat template (Jinja) in place of the model's.
        batch: number of prompts that run at once.
        skip_invalid: whether invalid prompts of several are left out; otherwise one of them ends the run.
        prefix_cache_bytes: most bytes of keys and values of earlier prompts and answers that later prompts reuse; 0
            reuses none. "auto": half of the memory that the prompts of a call leave unused, where prompts of several
            calls begin alike and nothing else is in the way.
    """

    text: str | None = None
    question: str | None = None
    file: str | None = None
    ids_file: str | None = None
    random_tokens: int | None = None
    chat: Chat = Chat.auto
    chat_template: str | None = None
    batch: int = 1
    skip_invalid: bool = False
    prefix_cache_bytes: int | str = AUTO

    def __post_init__(self) -> None:
        require_tree_size("prompt.prefix_cache_bytes", self.prefix_cache_bytes)
        self.chat = choice("prompt.chat", Chat, self.chat)
        require(self.batch >= 1, "prompt.batch", self.batch, "must be at least 1")
        if self.random_tokens is not None:
            require(self.random_tokens >= 1, "prompt.random_tokens", self.random_tokens, "must be at least 1")
            total = self.random_tokens * self.batch
            rule = f"times prompt.batch must be at most {MAX_RANDOM_TOKENS:,}"
            require(total <= MAX_RANDOM_TOKENS, "prompt.random_tokens", self.random_tokens, rule)


RATIO_SUM_TOLERANCE = 1.001e-3
"""Largest difference between the sum of the ratios and 1, since users write a third as 0.333."""


@dataclass(kw_only=True)
class PartitionOptions:
    """Split of the prompt over ranks.

    Attributes:
        ratios: share of each rank, or stage of `ranks.tensor` ranks, in order; they add up to 1.
        table: lookup table of the partitioner; partition=auto uses it if it is for this model and device.
        force: whether to use a table that was made for another model or device.
        learn: whether partition=auto corrects the split by every prompt.
        alone: whether partition=auto lets the last stage compute a prompt alone, with the threads that the ranks of its
            host lend it, where that is sooner. A server decides that by itself.
    """

    name: PartitionName = PartitionName.auto
    ratios: list[float] | None = None
    table: str | None = None
    force: bool = False
    learn: bool = True
    alone: bool = True

    def __post_init__(self) -> None:
        self.name = choice("partition", PartitionName, self.name)
        if self.name is PartitionName.ratios and not self.ratios:
            raise ValueError(
                "partition=ratios needs partition.ratios=[...], one share per rank or stage, such as [0.6,0.4]"
            )
        if self.name is PartitionName.table and not self.table:
            raise ValueError("partition=table needs partition.table=<json file>")
        if self.name is not PartitionName.ratios and self.ratios is not None:
            raise ValueError(
                f"partition.ratios={self.ratios} has no effect with partition={self.name.name}; add partition=ratios"
            )
        if self.name not in (PartitionName.table, PartitionName.auto) and self.table is not None:
            raise ValueError(
                f"partition.table={self.table} has no effect with partition={self.name.name}; add partition=table"
            )
        if self.ratios is not None:
            shares_are_right = all(0 <= ratio < math.inf for ratio in self.ratios)
            require(shares_are_right, "partition.ratios", self.ratios, "must not hold negative or infinite shares")
            total = math.fsum(self.ratios)
            close_to_one = abs(total - 1) <= RATIO_SUM_TOLERANCE
            require(close_to_one, "partition.ratios", self.ratios, f"must add up to 1, not {total:g}")

    @property
    def by_stage(self) -> bool:
        """Whether it has a chunk for each stage, however long the prompt."""
        return self.name in (PartitionName.ratios, PartitionName.table)


@dataclass(kw_only=True)
class DraftOptions:
    """The drafting model or policy, where drafts are not looked up: see `generation.speculate`.

    Attributes:
        model: folder, hub id or .gguf file of a smaller model with the same tokenizer.
        overrides: entries of that model's config in place of its own, as `ModelOptions.overrides`.
        policy: name and options of the cache policy that chooses what the model drafts from.
        speculate: who drafts for that policy or model, whose forward then verifies several tokens: none, lookup, or
            model for a policy.
    """

    model: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    speculate: Speculate = Speculate.none

    def __post_init__(self) -> None:
        self.speculate = choice("draft.speculate", Speculate, self.speculate)
        if self.speculate is Speculate.policy:
            raise ValueError("draft.speculate=policy is not one of none, lookup, model")
        if self.policy:
            with named("draft.policy"):
                self.policy = checked(self.policy)

    def needs_model(self, kind: Speculate, prefill: Speculative = Speculative.none) -> bool:
        """Whether a smaller model drafts: for the model, for a policy, or of prompts."""
        of_answers = kind is Speculate.model or (kind is Speculate.policy and self.speculate is Speculate.model)
        return of_answers or prefill is Speculative.model

    def check(self, generation: GenerationOptions, prefill: PrefillOptions) -> None:
        """Check that there is what the options of generation and prefill ask for. Raises: ValueError."""
        kind = generation.speculate
        if prefill.speculative is Speculative.model and self.model is None:
            raise ValueError(
                "prefill.speculative=model needs draft.model=<folder, hub id or .gguf>, a smaller model with the same "
                "tokens"
            )
        if kind is Speculate.model and self.model is None:
            raise ValueError(
                "generation.speculate=model needs draft.model=<folder, hub id or .gguf>, a smaller model with the same "
                "tokens"
            )
        if kind is Speculate.policy and not self.policy:
            raise ValueError(
                "generation.speculate=policy needs draft.policy={name:<policy>}, such as "
                "draft.policy='{name:snapkv,budget:0.1}'"
            )
        if self.speculate is Speculate.model and kind is Speculate.policy and self.model is None:
            raise ValueError(
                "draft.speculate=model needs draft.model=<folder, hub id or .gguf>, a smaller model with the same "
                "tokens"
            )


@dataclass(kw_only=True)
class RunOptions:
    """One run of launch/infer.py.

    Attributes:
        policy: name of the cache policy, positions, and the options that were given; see launch/inputs/policies.py.
        answers: file of JSON lines to which the answers to several prompts are appended, in place of standard output;
            prompts that it answers already are left out.
        report, timeline: files to write.
        profile: profiler for which ranges are named; that of torch is recorded into the timeline.
        warmup: runs before the measured one.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    prompt: PromptOptions = field(default_factory=PromptOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    policy: dict[str, Any] = field(default_factory=dict)
    cache: CacheOptions = field(default_factory=CacheOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    draft: DraftOptions = field(default_factory=DraftOptions)
    answers: str | None = None
    report: str | None = None
    timeline: str | None = None
    profile: Profile = Profile.none
    warmup: int = 0

    def __post_init__(self) -> None:
        self.policy = checked(self.policy)
        self.profile = choice("profile", Profile, self.profile)
        if self.profile is Profile.torch and self.timeline is None:
            raise ValueError(
                "profile=torch goes into the timeline, and there is none; add timeline=<json>, or use profile=nvtx"
            )
        require(self.warmup >= 0, "warmup", self.warmup, "must not be negative")
        require_reachable(self.generation)
        self.draft.check(self.generation, self.prefill)
        check(self.setup)

    @cached_property
    def setup(self) -> Setup:
        """Facts that the options give of the run. Its policies are made once."""
        prompt, draft = self.prompt, self.draft
        options = {
            "prompt.question": prompt.question,
            "prompt.ids_file": prompt.ids_file,
            "prompt.random_tokens": prompt.random_tokens,
            "prompt.chat": None if prompt.chat is Chat.auto else prompt.chat.name,
            "draft.speculate": "model" if draft.speculate is Speculate.model else None,
            "partition": self.partition.name.name if self.partition.by_stage else None,
        }
        size = prompt.prefix_cache_bytes
        asked = None if isinstance(size, str) else f"prompt.prefix_cache_bytes={size}" if size else ""
        return replace(setup_of(self, options), prefixes=asked)


def require_reachable(generation: GenerationOptions) -> None:
    """Check that an answer may be as long as it has to be. Raises: ValueError."""
    least, most = generation.min_new_tokens, generation.max_new_tokens
    rule = f"is more than generation.max_new_tokens={most}, where an answer ends; raise that, or lower this"
    require(least <= most, "generation.min_new_tokens", least, rule)


def only_outer(profile: Profile) -> Profile:
    """The option profile= of a program that writes no timeline. Raises: ValueError."""
    chosen = choice("profile", Profile, profile)
    if chosen is Profile.torch:
        raise ValueError(
            "profile=torch goes into timeline=, which only launch/infer.py writes; use profile=nvtx under a profiler "
            "such as Nsight Systems"
        )
    return chosen


def setup_of(run: Any, options: Mapping[str, Any]) -> Setup:
    """Facts that options give of the run of a program that generates.

    Args:
        options: those of the program alone, as of `Setup`.
    """
    name, has_policies, policies = run.policy["name"], chooses(run.policy), None
    if has_policies and "file" not in names_of(run.policy):  # a file is loaded by all ranks together
        with suppress(ValueError):  # which is raised when the run makes its policies
            policies = rank_policies(run.policy, run.cache)
    return Setup(
        prefill=run.prefill,
        decode=run.decode,
        cache=run.cache,
        generation=run.generation,
        num_shares=run.ranks.tensor,
        weights=run.model.weights,
        device=None if run.ranks.device is Device.auto else run.ranks.device.name,
        backend=None if run.ranks.backend is Backend.auto else run.ranks.backend.name,
        policy=f"policy={name}" if has_policies else "",
        policies=policies,
        segments="policy=prompt_cache" if name == "prompt_cache" else "",
        options={
            "ranks.tensor": None if run.ranks.tensor == 1 else run.ranks.tensor,
            "policy.positions": None if run.policy["positions"] == "original" else run.policy["positions"],
            "policy.retrieve": run.policy.get("retrieve"),
            **options,
        },
    )


Unused = tuple[str, list[str], bool, str]
"""A group of options, some of them, whether these have no effect, and with or without what."""


def ineffective_settings(run: RunOptions) -> list[str]:
    """A sentence for each option that differs from its default and has no effect in this run."""
    prompt, prefill, partition = run.prompt, run.prefill.name, run.partition.name
    is_single = prompt.ids_file is None and not (prompt.file or "").lower().endswith(".jsonl")
    sampling = ["temperature", "top_p", "top_k", "min_p", "seed"]
    drafting, speculate = ["speculate_tokens", "speculate_always"], run.generation.speculate
    drafts = speculate in (Speculate.policy, Speculate.model)
    looks_up = speculate is Speculate.lookup or (drafts and run.draft.speculate is Speculate.lookup)
    stops = bool(run.generation.stop or run.generation.stop_token_ids)
    unused: list[Unused] = [
        ("prompt", ["batch"], is_single and prompt.random_tokens is None, "on a single prompt"),
        ("prompt", ["skip_invalid"], is_single, "on a single prompt"),
        ("prompt", ["prefix_cache_bytes"], is_single, "on a single prompt"),
        ("prompt", ["chat_template"], prompt.chat is Chat.false, "with prompt.chat=false"),
        (
            "prompt",
            ["chat", "chat_template"],
            prompt.text is None and prompt.file is None,
            "without prompt.text or prompt.file",
        ),
        ("generation", sampling, not run.generation.may_sample, "without generation.do_sample=true"),
        ("generation", drafting, speculate is Speculate.none, "without generation.speculate"),
        (
            "generation",
            ["speculate_match"],
            not looks_up,
            "without speculate=lookup",
        ),
        ("generation", ["include_stop"], not stops, "without generation.stop or generation.stop_token_ids"),
        (
            "generation",
            ["kept_tokens"],
            not run.generation.skip_special_tokens,
            "with generation.skip_special_tokens=false",
        ),
        ("generation", ["logprobs"], run.report is None, "without report="),
        (
            "draft",
            ["model", "overrides"],
            not run.draft.needs_model(speculate, run.prefill.speculative),
            "without generation.speculate=model or prefill.speculative=model",
        ),
        ("draft", ["speculate"], not drafts, "without generation.speculate=policy or model"),
        ("cache", ["tier_bits"], run.policy["name"] != "prompt_cache", "without policy=prompt_cache"),
        (
            "model",
            ["seed"],
            run.model.name is not ModelName.random and prompt.random_tokens is None,
            "without model=random",
        ),
    ]
    sentences = _sentences(vars(run), unused) + ineffective_engine_settings(run)
    if run.policy == {"name": "full", "positions": Positions.reencoded.name}:
        sentences.append("policy.positions has no effect with policy=full")
    sentences += ineffective_options(run.policy)
    if run.draft.policy and speculate is not Speculate.policy:
        sentences.append("draft.policy has no effect without generation.speculate=policy")
    else:
        sentences += ineffective_options(run.draft.policy, "draft.policy")
    if run.decode.name is DecodeName.sharded and not run.prefill.takes_partition:
        sentences.append(f"decode=sharded has no effect with prefill={prefill.name}")
    splits = run.prefill.takes_partition or run.prefill.searches_chunks
    if not splits and _changed(run.partition, ["name"]):
        what = "prefill.chunk_tokens" if prefill is PrefillName.pipeline else f"prefill={prefill.name}"
        sentences.append(f"partition={partition.name} has no effect with {what}")
    return sentences


CHAIN_ONLY = ["transfer", "carrier", "layers_in_flight", "wire_bits"]
"""Options of a prefill that say how keys and values go along a chain."""


def ineffective_on_one_stage(run: Any) -> list[str]:
    """A sentence for each option that has no effect as there is one stage, beside those that never have one.

    Args:
        run: with the groups of an engine.
    """
    if not run.prefill.takes_partition:
        return []
    why = "on one rank" if run.ranks.tensor == 1 else "in one stage"
    learns = run.partition.name is PartitionName.auto
    unused: list[Unused] = [
        ("prefill", CHAIN_ONLY, True, why),
        ("partition", ["learn", "alone"], learns, why),
    ]
    sentences = _sentences(vars(run), unused)
    if run.partition.name is PartitionName.even:
        sentences.append(f"partition=even has no effect {why}")
    if run.decode.name is DecodeName.sharded:
        sentences.append(f"decode=sharded has no effect {why}")
    if run.policy.get("ranks", {}).get("others") is not None:
        sentences.append(f"policy.ranks.others has no effect {why}")
    return sentences


def ineffective_engine_settings(run: Any) -> list[str]:
    """A sentence for each option of model, prefill, partition and cache that has no effect, whatever the prompts.

    Args:
        run: with these groups.
    """
    prefill, partition, model = run.prefill.name, run.partition.name, run.model.name
    is_chain = prefill not in (PrefillName.tsp, PrefillName.zigzag)
    unused: list[Unused] = [
        ("prefill", CHAIN_ONLY, not run.prefill.takes_partition, f"with prefill={prefill.name}"),
        (
            "prefill",
            ["attention"],
            prefill is not PrefillName.tsp and not (run.prefill.is_sparse or run.prefill.streams),
            f"with prefill={prefill.name}",
        ),
        ("prefill", ["exchange"], prefill is not PrefillName.zigzag, f"with prefill={prefill.name}"),
        ("prefill", ["chunk_tokens"], not is_chain, f"with prefill={prefill.name}"),
        ("cache", ["residual", "residual_bits"], run.cache.bits is None, "without cache.bits"),
        ("partition", ["force"], partition is not PartitionName.table, "without partition=table"),
        ("partition", ["learn", "alone"], partition is not PartitionName.auto, "without partition=auto"),
        (
            "partition",
            ["table", "learn", "alone"],
            prefill is PrefillName.pipeline and partition is PartitionName.auto,
            "with prefill=pipeline",
        ),
        ("model", ["dequantize", "keep_dequantized"], model is not ModelName.hf, f"with model={model.name}"),
        ("model", ["trust_remote_code"], model is ModelName.smollm2, f"with model={model.name}"),
    ]
    return ineffective_method_settings(run.prefill) + _sentences(vars(run), unused)


def ineffective_method_settings(prefill: PrefillOptions) -> list[str]:
    """A sentence for each option of a prefill that has no effect without a sparse attention or a draft."""
    of_sparse = ["threshold", "density", "stride", "exact_layers"]
    of_draft, speculative = ["speculative_share", "speculative_chunk", "speculative_ahead"], prefill.speculative
    unused: list[Unused] = [
        ("prefill", of_sparse, not prefill.is_sparse, "without prefill.attention=xattention"),
        ("prefill", of_draft, speculative is Speculative.none, "without prefill.speculative"),
        (
            "prefill",
            ["speculative_layers"],
            speculative is not Speculative.layers,
            "without prefill.speculative=layers",
        ),
    ]
    return _sentences({"prefill": prefill}, unused)


def ineffective_split_settings(prefill: PrefillOptions, policy: Mapping[str, Any]) -> list[str]:
    """A sentence for each option that has no effect on a split or plan: of a prefill, and a policy without streams."""
    sentences = ineffective_method_settings(prefill)
    if policy["name"] != "full" and not prefill.streams:
        sentences.append(f"policy={policy['name']} has no effect here without prefill.attention=streaming_heads")
    return sentences


def _sentences(groups: Mapping[str, Any], unused: list[Unused]) -> list[str]:
    return [
        f"{section}.{name} has no effect {reason}"
        for section, names, is_unused, reason in unused
        if is_unused
        for name in _changed(groups[section], names)
    ]


def _changed(options: Any, names: list[str]) -> list[str]:
    defaults = type(options)()
    return [name for name in names if getattr(options, name) != getattr(defaults, name)]
