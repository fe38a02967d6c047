"""Options of launch/infer.py that the runtime does not take: prompt, partition, policy, and the run as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from runahead.config import (
    GenerationOptions,
    ModelName,
    ModelOptions,
    Positions,
    PrefillName,
    PrefillOptions,
    RanksOptions,
    choice,
    require,
)

# More tokens than any model takes.
MAX_RANDOM_TOKENS = 2**27


class Chat(Enum):
    auto = "auto"
    true = "true"
    false = "false"


class PartitionName(Enum):
    even = "even"
    ratios = "ratios"
    table = "table"


class PolicyName(Enum):
    full = "full"
    window = "window"
    streaming_llm = "streaming_llm"
    h2o = "h2o"
    snapkv = "snapkv"
    pyramidkv = "pyramidkv"
    pyramidinfer = "pyramidinfer"
    infinigen = "infinigen"
    quest = "quest"
    exact_topk = "exact_topk"
    offload = "offload"
    prompt_cache = "prompt_cache"
    sequence = "sequence"
    per_rank = "per_rank"


@dataclass(kw_only=True)
class PromptOptions:
    """Where the prompt comes from: text, file, ids_file or random_tokens. `batch` prompts run at once.

    `skip_invalid` leaves out those of several prompts that cannot be used, where otherwise none is answered.
    """

    text: str | None = None
    question: str | None = None
    file: str | None = None
    ids_file: str | None = None
    random_tokens: int | None = None
    chat: Chat = Chat.auto
    batch: int = 1
    skip_invalid: bool = False

    def __post_init__(self) -> None:
        self.chat = choice("prompt.chat", Chat, self.chat)
        require(self.batch >= 1, "prompt.batch", self.batch, "must be at least 1")
        if self.random_tokens is not None:
            require(self.random_tokens >= 1, "prompt.random_tokens", self.random_tokens, "must be at least 1")
            total = self.random_tokens * self.batch
            rule = f"times prompt.batch must be at most {MAX_RANDOM_TOKENS:,}"
            require(total <= MAX_RANDOM_TOKENS, "prompt.random_tokens", self.random_tokens, rule)


# How far the ratios may be from adding up to 1: people write thirds as 0.333.
RATIO_SUM_TOLERANCE = 1.001e-3


@dataclass(kw_only=True)
class PartitionOptions:
    """How the prompt is split over ranks; `ratios` holds each rank's share, in rank order, adding up to 1.

    `force` uses a `table` that was made for another model or device.
    """

    name: PartitionName = PartitionName.even
    ratios: list[float] | None = None
    table: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        self.name = choice("partition", PartitionName, self.name)
        if self.name is PartitionName.ratios and not self.ratios:
            raise ValueError("partition=ratios needs partition.ratios=[...], one share per rank, such as [0.6,0.4]")
        if self.name is PartitionName.table and not self.table:
            raise ValueError("partition=table needs partition.table=<json file>")
        if self.name is not PartitionName.ratios and self.ratios is not None:
            raise ValueError(
                f"partition.ratios={self.ratios} has no effect with partition={self.name.name}; add partition=ratios"
            )
        if self.name is not PartitionName.table and self.table is not None:
            raise ValueError(
                f"partition.table={self.table} has no effect with partition={self.name.name}; add partition=table"
            )
        if self.ratios is not None:
            shares_are_right = all(0 <= ratio < math.inf for ratio in self.ratios)
            require(shares_are_right, "partition.ratios", self.ratios, "must not hold negative or infinite shares")
            total = math.fsum(self.ratios)
            close_to_one = abs(total - 1) <= RATIO_SUM_TOLERANCE
            require(close_to_one, "partition.ratios", self.ratios, f"must add up to 1, not {total:g}")


@dataclass(kw_only=True)
class PlacesOptions:
    """Policies of the rank that decodes, and of those before it: each a name, or a name and options."""

    last: Any = None
    others: Any = None


@dataclass(kw_only=True)
class PolicyOptions:
    """What stays in the KV cache. Each policy has some of these options, whose defaults are its own.

    `steps` is for sequence, `ranks` for per_rank; a step is a name or {name: ..., option: ...}. `positions` is for all
    policies, which decide what is kept and not where it stands.
    """

    name: PolicyName = PolicyName.full
    positions: Positions = Positions.original
    budget: Any = None
    sinks: int | None = None
    recent: int | None = None
    evict_every: int | None = None
    window: int | None = None
    kernel: int | None = None
    pool: Any = field(default=None, metadata={"members": ("bytes", "victim")})
    recent_share: float | None = None
    beta: float | None = None
    schedule: str | None = None
    mean_keep: float | None = None
    recent_ratio: float | None = None
    voters: int | None = None
    newest_weight: float | None = None
    min_tokens: int | None = None
    cosine_start: float | None = None
    select: str | None = None
    top_p: float | None = None
    decay: float | None = None
    skew: str | None = None
    ratio: float | None = None
    alpha: float | None = None
    max_fetch: float | None = None
    fetch: Any = None
    first_layer: int | None = None
    first_ahead: int | None = None
    observed: int | None = None
    ahead: bool | None = None
    sample_every: int | None = None
    page: int | None = None
    schema: str | None = None
    store: str | None = None
    link_tokens: int | None = None
    device_bytes: Any = None
    host_bytes: Any = None
    disk_bytes: Any = None
    steps: Any = None
    ranks: PlacesOptions = field(default_factory=PlacesOptions)

    def __post_init__(self) -> None:
        self.name = choice("policy", PolicyName, self.name)
        self.positions = choice("policy.positions", Positions, self.positions)
        if self.name is not PolicyName.sequence and self.steps is not None:
            raise ValueError(
                f"policy.steps={self.steps} has no effect with policy={self.name.name}; add policy=sequence"
            )
        for place in ("last", "others"):
            value = getattr(self.ranks, place)
            if self.name is not PolicyName.per_rank and value is not None:
                raise ValueError(
                    f"policy.ranks.{place}={value} has no effect with policy={self.name.name}; add policy=per_rank"
                )
        if self.name is PolicyName.per_rank and self.ranks.last is None and self.ranks.others is None:
            raise ValueError("policy=per_rank needs policy.ranks.last=<policy> or policy.ranks.others=<policy>")


@dataclass(kw_only=True)
class RunOptions:
    """One run of launch/infer.py: groups, files to write, and the `warmup` runs before the measured one."""

    model: ModelOptions = field(default_factory=ModelOptions)
    prompt: PromptOptions = field(default_factory=PromptOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    report: str | None = None
    timeline: str | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        require(self.warmup >= 0, "warmup", self.warmup, "must not be negative")
        keeps_all = self.prefill.name not in (PrefillName.kv_runahead, PrefillName.single)
        if keeps_all and self.policy.name is not PolicyName.full:
            raise ValueError(
                f"policy={self.policy.name.name} needs prefill=kv_runahead or prefill=single; "
                f"prefill={self.prefill.name.name} keeps all K,V"
            )
        if self.prompt.skip_invalid and self.policy.name is PolicyName.prompt_cache:
            raise ValueError("prompt.skip_invalid does not go with policy=prompt_cache; leave invalid prompts out")


def ineffective_settings(run: RunOptions) -> list[str]:
    """One sentence per option that was changed from its default and changes nothing in this run."""
    sentences = []
    if (
        run.prompt.skip_invalid
        and run.prompt.ids_file is None
        and not (run.prompt.file or "").lower().endswith(".jsonl")
    ):
        sentences.append("prompt.skip_invalid has no effect on a single prompt")
    if not run.generation.do_sample:
        for name in _changed(run.generation, ["temperature", "top_p", "top_k", "seed"]):
            sentences.append(f"generation.{name} has no effect without generation.do_sample=true")
    prefill = run.prefill.name
    if prefill is not PrefillName.kv_runahead:
        for name in _changed(run.prefill, ["transfer", "layers_in_flight"]):
            sentences.append(f"prefill.{name} has no effect with prefill={prefill.name}")
    for name, reader in (("attention", PrefillName.tsp), ("exchange", PrefillName.zigzag)):
        if prefill is not reader and _changed(run.prefill, [name]):
            sentences.append(f"prefill.{name} has no effect with prefill={prefill.name}")
    if prefill not in (PrefillName.kv_runahead, PrefillName.single) and _changed(run.prefill, ["chunk_tokens"]):
        sentences.append(f"prefill.chunk_tokens has no effect with prefill={prefill.name}")
    if run.policy.name is PolicyName.full and _changed(run.policy, ["positions"]):
        sentences.append("policy.positions has no effect with policy=full")
    if not run.prefill.takes_partition:
        for name in _changed(run.partition, ["name"]):
            sentences.append(f"partition={getattr(run.partition, name).name} has no effect with prefill={prefill.name}")
    if run.partition.name is not PartitionName.table:
        for name in _changed(run.partition, ["force"]):
            sentences.append(f"partition.{name} has no effect without partition=table")
    if run.model.name is not ModelName.random and _changed(run.model, ["seed"]) and run.prompt.random_tokens is None:
        sentences.append("model.seed has no effect without model=random")
    return sentences


def _changed(options: Any, names: list[str]) -> list[str]:
    defaults = {f.name: f.default for f in fields(options)}
    return [name for name in names if getattr(options, name) != defaults[name]]
