"""The options of a run: plain dataclasses that check themselves.

They are the schema that the command line is merged into, and what library users pass to `Model.load` and
`Engine`. Names are the ones of the command line (`generation.top_p` is `GenerationOptions.top_p`). Every
mistake is a ValueError of one line. OmegaConf can use them as structured schemas, hence enums with lowercase
member names, and lists rather than tuples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar


class ModelName(Enum):
    smollm2 = "smollm2"
    hf = "hf"
    random = "random"


class DType(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Chat(Enum):
    auto = "auto"
    true = "true"
    false = "false"


class Backend(Enum):
    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"


class Device(Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class PrefillName(Enum):
    kv_runahead = "kv_runahead"
    single = "single"
    tsp = "tsp"
    zigzag = "zigzag"
    tensor = "tensor"


class Transfer(Enum):
    relay = "relay"
    direct = "direct"


class Attention(Enum):
    """How much of the attention map is computed: all of it, masked half included, or what causality leaves."""

    dense = "dense"
    causal = "causal"


class Exchange(Enum):
    all_gather = "all_gather"
    ring = "ring"
    direct = "direct"


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


class Positions(Enum):
    """Where a kept token stands: where it stood in the text, or in the cache, whose slots are numbered without gaps."""

    original = "original"
    reencoded = "reencoded"


E = TypeVar("E", bound=Enum)

# Far above what anybody needs, and below what other libraries take.
MAX_SEED = 2**62
MAX_LAYERS = 10_000
MAX_THREADS = 4096
MAX_TIMEOUT_S = 1_000_000
MAX_RANDOM_TOKENS = 2**27


def _choice(option: str, kind: type[E], value: object) -> E:
    """The member of `kind` that `value` names: a bare name, or the bool that YAML makes of `true`."""
    if isinstance(value, kind):
        return value
    name = str(value).lower() if isinstance(value, bool) else value
    if isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise ValueError(f"{option}={value!s} is not one of {', '.join(kind.__members__)}")


def _require(rule_holds: bool, option: str, value: object, rule: str) -> None:
    if not rule_holds:
        raise ValueError(f"{option}={value!s} {rule}")


@dataclass(kw_only=True)
class ModelOptions:
    """Which model, in which dtype. `seed` draws the weights of `random`, whose config may be given other `layers`."""

    name: ModelName = ModelName.smollm2
    path: str | None = None
    config: str | None = None
    dtype: DType = DType.auto
    seed: int = 0
    layers: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self.name = _choice("model", ModelName, self.name)
        self.dtype = _choice("model.dtype", DType, self.dtype)
        _require(0 <= self.seed <= MAX_SEED, "model.seed", self.seed, f"must be from 0 to {MAX_SEED}")
        if self.layers is not None:
            _require(1 <= self.layers <= MAX_LAYERS, "model.layers", self.layers, f"must be from 1 to {MAX_LAYERS:,}")
            _require(self.name is ModelName.random, "model.layers", self.layers, "is for model=random only")
        if self.name is ModelName.hf and not self.path:
            raise ValueError("model=hf needs model.path=<local folder, hub id or .gguf file>")
        if self.name is ModelName.random and not self.config:
            raise ValueError("model=random needs model.config=<model folder or config.json>")
        if self.name is not ModelName.hf and self.path is not None:
            raise ValueError(f"model.path={self.path} has no effect with model={self.name.name}; add model=hf")
        if self.name is not ModelName.random and self.config is not None:
            raise ValueError(f"model.config={self.config} has no effect with model={self.name.name}; add model=random")


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
        self.chat = _choice("prompt.chat", Chat, self.chat)
        _require(self.batch >= 1, "prompt.batch", self.batch, "must be at least 1")
        if self.random_tokens is not None:
            _require(self.random_tokens >= 1, "prompt.random_tokens", self.random_tokens, "must be at least 1")
            total = self.random_tokens * self.batch
            rule = f"times prompt.batch must be at most {MAX_RANDOM_TOKENS:,}"
            _require(total <= MAX_RANDOM_TOKENS, "prompt.random_tokens", self.random_tokens, rule)


@dataclass(kw_only=True)
class RanksOptions:
    """How the processes work together.

    `timeout_s` bounds the silence of a peer, and how long no rank gets anywhere; `threads` are the intra-op threads of
    one rank. What a rank knew when it had to end goes beside the file `fault_report`, or beside the run's report.
    """

    backend: Backend = Backend.auto
    device: Device = Device.auto
    timeout_s: float = 60.0
    threads: int | None = None
    fault_report: str | None = None

    def __post_init__(self) -> None:
        self.backend = _choice("ranks.backend", Backend, self.backend)
        self.device = _choice("ranks.device", Device, self.device)
        rule = f"must be a number of seconds above 0, and at most {MAX_TIMEOUT_S:,}"
        _require(0 < self.timeout_s <= MAX_TIMEOUT_S, "ranks.timeout_s", self.timeout_s, rule)
        if self.threads is not None:
            _require(
                1 <= self.threads <= MAX_THREADS, "ranks.threads", self.threads, f"must be from 1 to {MAX_THREADS}"
            )
        if self.backend is Backend.nccl and self.device is Device.cpu:
            raise ValueError("ranks.backend=nccl cannot move CPU tensors; use ranks.backend=gloo or ranks.device=cuda")


@dataclass(kw_only=True)
class PrefillOptions:
    """How the cache is filled. `layers_in_flight` bounds the layers whose K,V are under way at a time.

    `transfer` and `layers_in_flight` are for kv_runahead, `attention` is for tsp, and `exchange` for zigzag.
    `chunk_tokens` bounds the tokens that a rank computes at a time where it has the prompt for itself.
    """

    name: PrefillName = PrefillName.kv_runahead
    transfer: Transfer = Transfer.relay
    layers_in_flight: int = 3
    attention: Attention = Attention.causal
    exchange: Exchange = Exchange.all_gather
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        self.name = _choice("prefill", PrefillName, self.name)
        self.transfer = _choice("prefill.transfer", Transfer, self.transfer)
        self.attention = _choice("prefill.attention", Attention, self.attention)
        self.exchange = _choice("prefill.exchange", Exchange, self.exchange)
        # With one layer in flight no transfer could overlap the next layer's compute.
        _require(
            self.layers_in_flight >= 2,
            "prefill.layers_in_flight",
            self.layers_in_flight,
            "must be at least 2",
        )
        if self.chunk_tokens is not None:
            _require(self.chunk_tokens >= 1, "prefill.chunk_tokens", self.chunk_tokens, "must be at least 1")

    @property
    def takes_partition(self) -> bool:
        """Is the prompt split as the user says?"""
        return self.name is PrefillName.kv_runahead


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
        self.name = _choice("partition", PartitionName, self.name)
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
            _require(shares_are_right, "partition.ratios", self.ratios, "must not hold negative or infinite shares")
            total = math.fsum(self.ratios)
            close_to_one = abs(total - 1) <= RATIO_SUM_TOLERANCE
            _require(close_to_one, "partition.ratios", self.ratios, f"must add up to 1, not {total:g}")


@dataclass(kw_only=True)
class GenerationOptions:
    """What is generated. `top_k` 0 is off; `stop` strings end a row and are not part of its text."""

    max_new_tokens: int = 64
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "generation.max_new_tokens", self.max_new_tokens, "must be at least 1")
        hint = "must be above 0; generation.do_sample=false is greedy"
        _require(0 < self.temperature < math.inf, "generation.temperature", self.temperature, hint)
        _require(0 < self.top_p <= 1, "generation.top_p", self.top_p, "must be above 0 and at most 1")
        _require(self.top_k >= 0, "generation.top_k", self.top_k, "must not be negative; 0 is off")
        _require(0 <= self.seed <= MAX_SEED, "generation.seed", self.seed, f"must be from 0 to {MAX_SEED}")
        penalty_is_right = 0 < self.repetition_penalty < math.inf
        _require(
            penalty_is_right,
            "generation.repetition_penalty",
            self.repetition_penalty,
            "must be above 0; 1 is off",
        )
        if any(not text for text in self.stop):
            raise ValueError("generation.stop holds an empty string, which would stop at once; leave it out")


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
        self.name = _choice("policy", PolicyName, self.name)
        self.positions = _choice("policy.positions", Positions, self.positions)
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
        _require(self.warmup >= 0, "warmup", self.warmup, "must not be negative")
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
