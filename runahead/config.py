"""Options that the runtime takes: plain dataclasses that check themselves.

They are the schema that the command line is merged into, and what library users pass to `Model.load` and `Engine`;
launch/inputs/options.py has those that only the programs take. Names are the ones of the command line
(`generation.top_p` is `GenerationOptions.top_p`). Every mistake is a ValueError of one line. OmegaConf can use them as
structured schemas, hence enums with lowercase member names, and lists rather than tuples.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pkgutil import resolve_name
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Table(Mapping[K, V]):
    """Classes or functions by the option that chooses among them. What is looked up is imported, and nothing else.

    Args:
        places: of each, as "module:name".
    """

    def __init__(self, places: Mapping[K, str]) -> None:
        self._places = places

    def __getitem__(self, name: K) -> V:
        value: V = resolve_name(self._places[name])
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[K]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


BITS = (8, 4, 2)
"""Numbers of bits in which keys and values can be stored."""

WIRE_BITS = (8, 4)
"""Numbers of bits in which they can be sent."""


class ModelName(Enum):
    smollm2 = "smollm2"
    hf = "hf"
    random = "random"


class DType(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Fuse(Enum):
    """Whether modules of a model are computed by fewer operations than its family's code has.

    auto: where it was measured to pay, in float32 on a CPU.
    """

    auto = "auto"
    on = "on"
    off = "off"


class Weights(Enum):
    """Numbers of linear layers' weights: in the model's dtype, or rounded to 8 bits."""

    full = "full"
    int8 = "int8"


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
    pipeline = "pipeline"


class Transfer(Enum):
    relay = "relay"
    direct = "direct"


class Carrier(Enum):
    """Carrier of keys and values along the chain: copies inside a host, or the backend of the ranks everywhere."""

    auto = "auto"
    copy = "copy"
    backend = "backend"


class Profile(Enum):
    """Profiler for which ranges are named: one around the program (NVTX), torch's own, or none."""

    none = "none"
    nvtx = "nvtx"
    torch = "torch"


class Attention(Enum):
    """Scores that a prefill computes.

    causal: of all keys that a query sees; dense: of TSP, also of those that it does not, which are masked; xattention:
    of keys in the blocks that are expected to receive most of the attention; streaming_heads: in the KV heads that the
    cache policy says, of the first and the last keys. The last two change answers.
    """

    dense = "dense"
    causal = "causal"
    xattention = "xattention"
    streaming_heads = "streaming_heads"


class Exchange(Enum):
    all_gather = "all_gather"
    ring = "ring"
    direct = "direct"


class DecodeName(Enum):
    """Keys and values while decoding: all on the last rank, on each rank those of its chunk, or whichever is faster."""

    auto = "auto"
    last = "last"
    sharded = "sharded"


class Speculate(Enum):
    """The kind of draft, several tokens of which one forward verifies.

    Nothing; look-up of what followed earlier in the text; the model itself over what a cache policy keeps of the
    prompt; or a smaller model.
    """

    none = "none"
    lookup = "lookup"
    policy = "policy"
    model = "model"


class Speculative(Enum):
    """The draft by which a prefill chooses the tokens of a prompt that are computed.

    None, and all are computed; the first layers of the model; or a smaller model.
    """

    none = "none"
    layers = "layers"
    model = "model"


class Positions(Enum):
    """Position of a kept token: its position in the text, or its slot in the cache, which are numbered without gaps."""

    original = "original"
    reencoded = "reencoded"


E = TypeVar("E", bound=Enum)

# Far above any use, and below the limits of other libraries.
MAX_SEED = 2**62
MAX_LAYERS = 10_000
MAX_THREADS = 4096
MAX_RANKS = 1 << 20
MAX_TIMEOUT_S = 1_000_000

# Limits of OpenAI's API.
MAX_PENALTY = 2
MAX_BIAS = 100
MAX_LOGPROBS = 20

MAX_DRAFT_TOKENS = 64

SPARSE_BLOCK = 128
"""Tokens of a block of queries, and of one of keys, of prefill.attention=xattention (XAttention's size)."""


def choice(option: str, kind: type[E], value: object) -> E:
    """The member of `kind` with the name `value`; `value` may be the bool that YAML makes of `true`.

    Raises: ValueError.
    """
    if isinstance(value, kind):
        return value
    name = str(value).lower() if isinstance(value, bool) else value
    if isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise ValueError(f"{option}={value!s} {not_one_of(value, kind.__members__)}")


def not_one_of(value: object, known: Iterable[str]) -> str:
    """End of a message about a name that is unknown: the known ones, and that which it may stand for."""
    names = list(known)
    close = difflib.get_close_matches(str(value), names, n=1)
    return f"is not one of {', '.join(names)}" + (f"; did you mean {close[0]}?" if close else "")


def hydra_text(value: object) -> str:
    """A plain value as Hydra's grammar has it, whose keys are without quotes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_text, value)) + "]"
    return json.dumps(value)


def require(rule_holds: bool, option: str, value: object, rule: str) -> None:
    """Raise a ValueError with the option, its value and the rule, unless the rule holds."""
    if not rule_holds:
        raise ValueError(f"{option}={value!s} {rule}")


@dataclass(kw_only=True)
class ModelOptions:
    """Model and dtype.

    Attributes:
        path: local folder, hub id or GGUF file of model=hf.
        config: model folder or config.json of model=random.
        dtype: of weights, keys and values; auto is the checkpoint's, float32 for quantised GGUF files on a CPU and
            bfloat16 on a GPU.
        seed: seed of the weights of model=random.
        layers: number of layers of model=random, in place of the config's.
        overrides: entries of the model's config in place of its own, by name, such as `rope_parameters` and
            `max_position_embeddings`; see docs/models.md.
        revision: branch, tag or commit of a model of the hub.
        dequantize: decode weights that a checkpoint has in few bits; without it such a checkpoint is refused.
        keep_dequantized: keep decoded weights in the cache folder, from which later starts map them.
        fuse: on computes q, k and v, gate and up, gated MLPs, norms and rotary embeddings by one operation each, where
            logits stay what they are; auto does so in float32 on CPUs.
        weights: int8 rounds the weights of linear layers, and what they are given, to 8 bits, on CPUs: answers change.
        adapter: folders or hub ids of LoRA adapters, whose sum is merged into the weights; one may be given as a text.
    """

    name: ModelName = ModelName.smollm2
    path: str | None = None
    config: str | None = None
    dtype: DType = DType.auto
    seed: int = 0
    layers: int | None = None
    trust_remote_code: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    fuse: Fuse = Fuse.auto
    adapter: list[str] = field(default_factory=list)
    dequantize: bool = True
    keep_dequantized: bool = False
    weights: Weights = Weights.full

    def __post_init__(self) -> None:
        self.name = choice("model", ModelName, self.name)
        given: Any = self.adapter
        self.adapter = [given] if isinstance(given, str) else list(given)
        require(all(self.adapter), "model.adapter", self.adapter, "must be folders or hub ids of adapters")
        if self.adapter and self.name is ModelName.random:
            raise ValueError(f"model.adapter={self.adapter[0]} is for the weights of a checkpoint; use model=hf")
        self.dtype = choice("model.dtype", DType, self.dtype)
        self.fuse = choice("model.fuse", Fuse, self.fuse)
        self.weights = choice("model.weights", Weights, self.weights)
        require(0 <= self.seed <= MAX_SEED, "model.seed", self.seed, f"must be from 0 to {MAX_SEED}")
        if self.layers is not None:
            require(1 <= self.layers <= MAX_LAYERS, "model.layers", self.layers, f"must be from 1 to {MAX_LAYERS:,}")
            require(self.name is ModelName.random, "model.layers", self.layers, "is for model=random only")
        if self.name is ModelName.hf and not self.path:
            raise ValueError("model=hf needs model.path=<local folder, hub id or .gguf file>")
        if self.name is ModelName.random and not self.config:
            raise ValueError("model=random needs model.config=<model folder or config.json>")
        if self.name is not ModelName.hf and self.path is not None:
            raise ValueError(f"model.path={self.path} has no effect with model={self.name.name}; add model=hf")
        if self.name is not ModelName.random and self.config is not None:
            raise ValueError(f"model.config={self.config} has no effect with model={self.name.name}; add model=random")
        if self.name is not ModelName.hf and self.revision is not None:
            raise ValueError(f"model.revision={self.revision} has no effect with model={self.name.name}; add model=hf")
        if self.keep_dequantized and (self.adapter or not self.dequantize):
            other = "model.adapter" if self.adapter else "model.dequantize=false"
            raise ValueError(f"model.keep_dequantized=true does not go with {other}; leave one of them out")

    def __repr__(self) -> str:
        # Measurements are known by it, and those from before the last options existed still are.
        first = {each.name: each.default for each in fields(self)} | {"overrides": {}, "adapter": []}
        later = ("overrides", "revision", "fuse", "adapter", "dequantize", "weights", "keep_dequantized")
        names = [name for name in first if name in later]
        hidden = [name for name in names if getattr(self, name) == first[name]]
        shown = [name for name in first if name not in hidden]
        return f"ModelOptions({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


@dataclass(kw_only=True)
class RanksOptions:
    """Arrangement, backend, device and time limits of the ranks.

    Attributes:
        timeout_s: longest silence of a peer, and longest time in which no rank makes progress, in seconds.
        tensor: ranks that share one model, a stage of the chain.
        threads: intra-op threads of one rank while all compute.
        fault_report: path beside which a rank that has to end writes its fault report; by default the run's report.
    """

    backend: Backend = Backend.auto
    device: Device = Device.auto
    tensor: int = 1
    timeout_s: float = 60.0
    threads: int | None = None
    fault_report: str | None = None

    def __post_init__(self) -> None:
        self.backend = choice("ranks.backend", Backend, self.backend)
        self.device = choice("ranks.device", Device, self.device)
        rule = f"must be a number of seconds above 0, and at most {MAX_TIMEOUT_S:,}"
        require(0 < self.timeout_s <= MAX_TIMEOUT_S, "ranks.timeout_s", self.timeout_s, rule)
        require(1 <= self.tensor <= MAX_RANKS, "ranks.tensor", self.tensor, f"must be from 1 to {MAX_RANKS:,}")
        if self.threads is not None:
            require(1 <= self.threads <= MAX_THREADS, "ranks.threads", self.threads, f"must be from 1 to {MAX_THREADS}")
        if self.backend is Backend.nccl and self.device is Device.cpu:
            raise ValueError("ranks.backend=nccl cannot move CPU tensors; use ranks.backend=gloo or ranks.device=cuda")


@dataclass(kw_only=True)
class PrefillOptions:
    """Method that fills the KV cache.

    Attributes:
        transfer: way of keys and values along the chain of kv_runahead.
        carrier: what carries keys and values between ranks of one host, for kv_runahead.
        layers_in_flight: most layers whose keys and values are being sent at a time, for kv_runahead.
        attention: scores that are computed.
        threshold: share of a block of queries' expected attention that xattention covers; 1 is all.
        density: share of the blocks of keys that it computes, in place of the threshold.
        stride: tokens of a cell, of whose mean query and key it expects the attention.
        exact_layers: numbers of the layers that attend to all keys beside xattention in the others.
        exchange: way of keys and values between all ranks, for zigzag.
        chunk_tokens: most tokens that are computed at a time if one rank has the whole prompt, None is all; or of a
            chunk of pipeline.
        row_tokens: most tokens of a chunk that a layer computes at a time; 0 is all, None by memory.
        speculative: the draft that chooses the tokens of a prompt that are computed.
        speculative_share: share of the prompt's chunks that is computed.
        speculative_chunk: tokens of a chunk.
        speculative_ahead: tokens that the draft generates, whose attention chooses.
        speculative_layers: number of the model's first layers that draft; None is a sixth of them.
        wire_bits: of each number of the keys and values that the ranks of a chain send, 8 or 4; None sends them as they
            are. A rank's own chunk is exact.
    """

    name: PrefillName = PrefillName.kv_runahead
    transfer: Transfer = Transfer.relay
    carrier: Carrier = Carrier.backend
    layers_in_flight: int = 3
    attention: Attention = Attention.causal
    threshold: float = 0.99
    density: float | None = None
    stride: int = 16
    exact_layers: list[int] = field(default_factory=list)
    exchange: Exchange = Exchange.all_gather
    chunk_tokens: int | None = None
    row_tokens: int | None = None
    speculative: Speculative = Speculative.none
    speculative_share: float = 0.25
    speculative_chunk: int = 32
    speculative_ahead: int = 8
    speculative_layers: int | None = None
    wire_bits: int | None = None

    def __post_init__(self) -> None:
        self.name = choice("prefill", PrefillName, self.name)
        self.speculative = choice("prefill.speculative", Speculative, self.speculative)
        share, layers = self.speculative_share, self.speculative_layers
        require(0 < share <= 1, "prefill.speculative_share", share, "must be a share in (0, 1]")
        for name in ("speculative_chunk", "speculative_ahead"):
            require(getattr(self, name) >= 1, f"prefill.{name}", getattr(self, name), "must be at least 1 token")
        require(layers is None or layers >= 1, "prefill.speculative_layers", layers, "must be at least 1")
        self.transfer = choice("prefill.transfer", Transfer, self.transfer)
        self.carrier = choice("prefill.carrier", Carrier, self.carrier)
        self.attention = choice("prefill.attention", Attention, self.attention)
        self.exchange = choice("prefill.exchange", Exchange, self.exchange)
        # With one layer in flight no transfer could overlap the next layer's compute.
        require(self.layers_in_flight >= 2, "prefill.layers_in_flight", self.layers_in_flight, "must be at least 2")
        if self.chunk_tokens is not None:
            require(self.chunk_tokens >= 1, "prefill.chunk_tokens", self.chunk_tokens, "must be at least 1")
        if self.row_tokens is not None:
            require(self.row_tokens >= 0, "prefill.row_tokens", self.row_tokens, "must be at least 0")
        require(self.wire_bits in (None, *WIRE_BITS), "prefill.wire_bits", self.wire_bits, "must be 8, 4 or null")
        require(0 < self.threshold <= 1, "prefill.threshold", self.threshold, "must be above 0 and at most 1; 1 is all")
        if self.density is not None:
            require(0 < self.density <= 1, "prefill.density", self.density, "must be above 0 and at most 1; 1 is all")
            is_alone = self.threshold == PrefillOptions.threshold
            rule = "does not go with prefill.threshold, in whose place it is; leave one of them out"
            require(is_alone, "prefill.density", self.density, rule)
        is_divisor = 1 <= self.stride <= SPARSE_BLOCK and SPARSE_BLOCK % self.stride == 0
        require(is_divisor, "prefill.stride", self.stride, f"must be a divisor of {SPARSE_BLOCK}, such as 8 or 16")
        exact = self.exact_layers
        rule = f"must be numbers of layers from 0 to {MAX_LAYERS - 1:,}"
        are_numbers = all(type(layer) is int and 0 <= layer < MAX_LAYERS for layer in exact)
        require(are_numbers, "prefill.exact_layers", exact, rule)
        twice = sorted({layer for layer in exact if exact.count(layer) > 1})
        require(not twice, "prefill.exact_layers", exact, f"names {', '.join(map(str, twice))} twice; name each once")
        self.exact_layers = sorted(exact)
        for name in ("chunk_tokens", "row_tokens") if self.is_sparse else ():
            value, rule = getattr(self, name), f"must be a multiple of {SPARSE_BLOCK} with prefill.attention=xattention"
            require(not value or value % SPARSE_BLOCK == 0, f"prefill.{name}", value, rule)

    @property
    def is_sparse(self) -> bool:
        """Whether queries attend to some blocks of keys alone."""
        return self.attention is Attention.xattention

    @property
    def block(self) -> int:
        """Tokens of which a rank's chunk is a multiple."""
        return SPARSE_BLOCK if self.is_sparse else 1

    @property
    def streams(self) -> bool:
        """Whether some KV heads attend to the first and the last tokens alone."""
        return self.attention is Attention.streaming_heads

    @property
    def sparsity(self) -> dict[str, Any]:
        """The options of a sparse attention, by their names; none of another one."""
        names = ("stride", "threshold" if self.density is None else "density") if self.is_sparse else ()
        is_any, exact = self.is_sparse or self.streams, self.is_sparse and self.exact_layers
        return (
            ({"attention": self.attention.name} if is_any else {})
            | {name: getattr(self, name) for name in names}
            | ({"exact_layers": exact} if exact else {})
        )

    @property
    def takes_partition(self) -> bool:
        """Whether the prompt is split by the user's partition."""
        return self.name is PrefillName.kv_runahead

    @property
    def searches_chunks(self) -> bool:
        """Whether the partition chooses the chunks, of any number, in which a pipeline computes a prompt."""
        return self.name is PrefillName.pipeline and self.chunk_tokens is None


@dataclass(kw_only=True)
class CacheOptions:
    """Precision of stored keys and values. Those that ranks send each other are in the model's dtype.

    Attributes:
        bits: of each number but the newest tokens': 8, 4 or 2; None is the model's dtype.
        residual: number of last tokens in `residual_bits`; up to 31 more are, as whole groups of 32 leave.
        residual_bits: of each of their numbers: 16, or None for the model's dtype.
        tier_bits: of each number of texts in host memory and on disk that later prompts reuse, whatever `bits`: 8, 4 or
            2; None is the model's dtype.
    """

    bits: int | None = None
    residual: int = 128
    residual_bits: int | None = 16
    tier_bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("bits", "tier_bits"):
            value = getattr(self, name)
            require(value in (None, *BITS), f"cache.{name}", value, "must be 8, 4 or 2, or null for the model's dtype")
        require(self.residual >= 1, "cache.residual", self.residual, "must be at least 1 token")
        valid = self.residual_bits in (None, 16)
        require(valid, "cache.residual_bits", self.residual_bits, "must be 16, or null for the model's dtype")


@dataclass(kw_only=True)
class DecodeOptions:
    """Options of the ranks that keep keys and values while decoding, and so decode."""

    name: DecodeName = DecodeName.auto

    def __post_init__(self) -> None:
        self.name = choice("decode", DecodeName, self.name)


OF_MODEL = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling options that a checkpoint's generation_config.json may have."""

_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A JSON schema or a grammar that the text of a row follows.

    Attributes:
        text: a JSON schema, as JSON text, or a grammar in llguidance's form of Lark.
        is_schema: which of the two it is.
        free_part: texts that begin and end a part before that, in which any text may stand; None if there is none.
    """

    text: str
    is_schema: bool
    free_part: tuple[str, str] | None = None


@dataclass(kw_only=True)
class GenerationOptions:
    """Number of new tokens, sampling, and what ends a row. `runahead.decoding.sampling.Sampler` has the formulas.

    Attributes:
        of_model: sampling options that have their defaults are those of the checkpoint's generation_config.json, if it
            has them (`resolved`).
        top_k: number of tokens to sample from; 0 is off.
        min_p: least probability of a token to sample, as a share of the most probable one's; 0 is off.
        logit_bias: what is added to the logits of tokens, by token id.
        min_new_tokens: least number of tokens before one that ends a row; stop strings that are complete before it do
            not count.
        stop: strings that end a row; they are not part of its text.
        stop_token_ids: tokens that end it, beside the model's own; they are not part of its text.
        include_stop: the text has the stop string or the token of `stop_token_ids` that ended it.
        skip_special_tokens: it has no special tokens.
        kept_tokens: special tokens that a row's text has, by their names; all others are left out of it.
        json_schema: JSON schema, as JSON text, that the text of a row follows.
        grammar: grammar that it follows, in llguidance's form of Lark.
        free_part: two texts between which a row may say anything before it follows the schema or the grammar, such as
            <think> and </think>; if the first is empty, the row begins in this part.
        logprobs: number of most likely tokens that are given at each place with their log-probabilities, beside that of
            the new token; None gives none.
        speculate: what drafts tokens that are verified several at a time. The tokens are those that are generated
            without it.
        speculate_tokens: most tokens of a draft.
        speculate_match: tokens at the end of the text that look-up has to find earlier in it.
        speculate_always: verify every draft, also where that takes longer than decoding without it.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    of_model: bool = False
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop: bool = False
    skip_special_tokens: bool = True
    kept_tokens: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    json_schema: str | None = None
    grammar: str | None = None
    free_part: list[str] = field(default_factory=list)
    logprobs: int | None = None
    speculate: Speculate = Speculate.none
    speculate_tokens: int = 8
    speculate_match: int = 2
    speculate_always: bool = False

    def __post_init__(self) -> None:
        self.speculate = choice("generation.speculate", Speculate, self.speculate)
        most, name = MAX_DRAFT_TOKENS, "generation.speculate_tokens"
        require(1 <= self.speculate_tokens <= most, name, self.speculate_tokens, f"must be from 1 to {most}")
        require(self.speculate_match >= 1, "generation.speculate_match", self.speculate_match, "must be at least 1")
        require(self.max_new_tokens >= 1, "generation.max_new_tokens", self.max_new_tokens, "must be at least 1")
        require(self.min_new_tokens >= 0, "generation.min_new_tokens", self.min_new_tokens, "must not be negative")
        for token in self.stop_token_ids:
            require(token >= 0, "generation.stop_token_ids", token, "must be token ids")
        hint = "must be above 0; generation.do_sample=false is greedy"
        require(0 < self.temperature < math.inf, "generation.temperature", self.temperature, hint)
        require(0 < self.top_p <= 1, "generation.top_p", self.top_p, "must be above 0 and at most 1")
        require(self.top_k >= 0, "generation.top_k", self.top_k, "must not be negative; 0 is off")
        require(0 <= self.min_p <= 1, "generation.min_p", self.min_p, "must be from 0 to 1; 0 is off")
        require(0 <= self.seed <= MAX_SEED, "generation.seed", self.seed, f"must be from 0 to {MAX_SEED}")
        penalty = self.repetition_penalty
        require(0 < penalty < math.inf, "generation.repetition_penalty", penalty, "must be above 0; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            value, most = getattr(self, name), MAX_PENALTY
            require(-most <= value <= most, f"generation.{name}", value, f"must be from -{most} to {most}; 0 is off")
        for token, bias in self.logit_bias.items():
            rule = f"must have token ids and numbers from -{MAX_BIAS} to {MAX_BIAS}"
            require(token >= 0 and -MAX_BIAS <= bias <= MAX_BIAS, "generation.logit_bias", {token: bias}, rule)
        if any(not text for text in self.stop):
            raise ValueError("generation.stop holds an empty string, which would stop at once; leave it out")
        if self.json_schema is not None and not _is_json_object(self.json_schema):
            raise ValueError('generation.json_schema is not an object in JSON, such as {"type": "object"}')
        if self.free_part:
            rule = "must be two texts, of which the second one is not empty"
            are_two = len(self.free_part) == 2 and bool(self.free_part[1])
            require(are_two, "generation.free_part", self.free_part, rule)
            rule = "has no effect without generation.json_schema or generation.grammar; leave it out"
            require(self.guide is not None, "generation.free_part", self.free_part, rule)
        if self.guide is not None and self.ignore_eos:
            name = "json_schema" if self.guide.is_schema else "grammar"
            what = f"does not go with generation.{name}, which ends the text"
            raise ValueError(f"generation.ignore_eos=true {what}; leave it out")
        if self.grammar is not None and self.json_schema is not None:
            raise ValueError("generation.json_schema and generation.grammar are both given; leave one of them out")
        if self.logprobs is not None:
            rule = f"must be from 0 to {MAX_LOGPROBS}"
            require(0 <= self.logprobs <= MAX_LOGPROBS, "generation.logprobs", self.logprobs, rule)

    @property
    def may_sample(self) -> bool:
        """Whether it samples, as far as that is known before the checkpoint is."""
        return self.do_sample or self.of_model

    @property
    def asks_for_drafts(self) -> bool:
        return self.speculate is not Speculate.none

    def resolved(self, generation_config: Any) -> GenerationOptions:
        """These options with `of_model` carried out.

        Args:
            generation_config: of the model, as transformers has it.

        Raises:
            ValueError: it has a value that cannot be.
        """
        if not self.of_model:
            return self
        default, found = GenerationOptions(), dict[str, Any]()
        for name in OF_MODEL:
            value = getattr(generation_config, name, None)
            if value is not None and getattr(self, name) == getattr(default, name):
                found[name] = _of_checkpoint(name, value, type(getattr(default, name)))
        return replace(self, of_model=False, **found)

    @property
    def guide(self) -> Guide | None:
        """The schema or grammar that the text of a row follows; None if it may be any text."""
        text = self.grammar if self.json_schema is None else self.json_schema
        if text is None:
            return None
        begin, end = self.free_part or ("", "")
        return Guide(text=text, is_schema=self.json_schema is not None, free_part=(begin, end) if end else None)


def _of_checkpoint(name: str, value: Any, kind: type) -> Any:
    """A checkpoint's value of an option of this kind. Raises: ValueError."""
    is_of_kind = type(value) is kind or (kind is float and type(value) is int)
    reason = None if is_of_kind else _WORDS[kind]
    if reason is None:
        try:
            return getattr(GenerationOptions(**{name: kind(value)}), name)
        except ValueError as error:  # whose remedies are for options that a user has given
            reason = str(error).partition(" ")[2].partition(";")[0].removeprefix("must be ")
    raise ValueError(
        f"the checkpoint's generation_config.json has {name}={value!s}, which must be {reason}; "
        "use generation=greedy or generation=sample, or correct the file"
    )


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
