"""Interface of prefill strategies: `Prefill`, the job it takes and the result it returns."""

# Legend: B batch, S tokens of the padded prompt, V vocabulary.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from policies.reuse import GivenPrompt
from policies.row_values import sent
from runahead.attention.sparse.streaming import Streaming
from runahead.attention.states import States
from runahead.cache.base import KVStore
from runahead.cache.shard import Shard
from runahead.config import PrefillOptions
from runahead.context import ContextPartition, Partitioner
from runahead.model.model import Model
from runahead.prefill.scoring import PromptScorer
from runahead.ranks.ranks import Ranks
from runahead.report import PromptLogprobs, RankReport
from runahead.thinning.rank_policies import RankPolicies
from runahead.timeline.trace import TraceSpan

if TYPE_CHECKING:
    from runahead.reuse.handover import Handover
    from runahead.reuse.prefixes import RowPrefix
    from runahead.reuse.reused_kv import ReusedKV
    from runahead.reuse.stored_prefix import StoredPrefix


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts of different lengths, padded on the left.

    Attributes:
        ids_BS: token ids.
        pads: left padding of each row.
    """

    ids_BS: Tensor
    pads: list[int]

    @classmethod
    def from_prompts(cls, prompts: list[list[int]], device: torch.device) -> PromptBatch:
        """Create from token ids."""
        longest = max(len(prompt) for prompt in prompts)
        pads = [longest - len(prompt) for prompt in prompts]
        rows = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]  # any id will do for padding
        return cls(ids_BS=sent(torch.tensor(rows), device), pads=pads)

    @property
    def num_tokens(self) -> int:
        return self.ids_BS.shape[1]


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """The facts of a prefill that all ranks know: agreed on by `Engine.generate`, or told by rank 0 of a server.

    Attributes:
        prompts: token ids, or prompts that reuse segments.
        partition: chunks of the longest prompt, in tokens that are computed.
        num_new: most tokens that are generated after a prompt.
        reuses: prefixes are reused, if the engine does.
        stored: number of first tokens of each prompt that all stages of a chain reuse. The last one computes what it
            lacks of them. One stage that computes the prompts alone reuses all that it has, whatever this says.
        owners: of each of these tokens, the stage that has it; () if the last one has all.
        shards: what each stage stores for decoding; None if the last one stores everything.
        scores: compute the log-probabilities of the prompts' tokens, and give that many of the most likely ones at
            each place, too; None computes none. Such prompts are computed whole.
        record: fill the spans of the result.
        salts: of the prompts, as of `Prefixes.find`.
        hands_over: some prompt is handed over to another engine.
    """

    prompts: Sequence[GivenPrompt]
    partition: ContextPartition
    num_new: int
    reuses: bool = False
    salts: Sequence[str] = ()
    stored: Sequence[int] = ()
    owners: Sequence[Sequence[int]] = ()
    shards: Mapping[int, Shard] | None = None
    scores: int | None = None
    record: bool = False
    hands_over: bool = False


class PrefillCancelled(Exception):
    """Nobody wants the prompts of this prefill any more."""


class InterleavedWork(Protocol):
    """Other work of a rank inside a prefill. All ranks of a stage call it in the same places."""

    def after_layer(self, done: int, of: int) -> None:
        """Called after each layer's attention.

        Args:
            done: number of layers so far, this one included.
            of: number of layers that the rank computes, those of every piece if it computes the prompt in pieces.

        Raises:
            PrefillCancelled: the rest is not to be computed.
        """

    def after_segment_layer(self) -> None:
        """Called after each layer of a segment that is encoded, which is computed to its end."""

    def until(self, arrived: Callable[[float], bool], what: str, peers: Iterable[int]) -> None:
        """Called before a rank waits for keys and values; may return before they have arrived.

        Args:
            arrived: whether they have; called with the seconds that it may block.
            what: what is waited for, for messages.
            peers: ranks that can delay it.
        """


class NeverCancelled:
    """Interleaved work inside the recomputation of a lost prefix, which is never cancelled."""

    def __init__(self, meanwhile: InterleavedWork) -> None:
        self._meanwhile = meanwhile
        self.until = meanwhile.until

    def after_layer(self, done: int, of: int) -> None:
        self._meanwhile.after_segment_layer()

    def after_segment_layer(self) -> None:
        self._meanwhile.after_segment_layer()


def streaming_of(policies: RankPolicies, model: Model, *, num_tokens: int, pads: Sequence[int]) -> Streaming:
    """The streaming heads of a padded prompt, as a policy names them."""
    [policy] = policies.last
    heads = policy.streamed_heads(num_tokens)
    assert heads is not None, policy
    return Streaming.of(heads, exact=never_streaming(model), pads=pads)


def never_streaming(model: Model) -> list[int]:
    """Layers in which no head streams: with windows, and those that others read."""
    return [n for n, shape in enumerate(model.kv_shapes) if model.rules[n] is not None or shape.readers]


def exact_layers(model: Model, options: PrefillOptions) -> frozenset[int]:
    """Layers of `prefill.exact_layers`, numbered among those that store keys and values.

    Raises:
        ValueError: one is no layer of the model, or none that xattention would let attend to fewer keys.
    """
    number_of = {layer: number for number, layer in enumerate(model.kv_layers) if model.rules[number] is None}
    require_exact(options, number_of, model.name)
    return frozenset(number_of[layer] for layer in options.exact_layers)


def require_exact(options: PrefillOptions, choosing: Collection[int], model: str) -> None:
    """Check that xattention would choose keys in each layer of `prefill.exact_layers`.

    Args:
        choosing: layers in which it does.
        model: its name.

    Raises:
        ValueError: it does not in one of them.
    """
    others = [layer for layer in options.exact_layers if layer not in choosing]
    if others:
        raise ValueError(
            f"prefill.exact_layers={options.exact_layers} names {', '.join(map(str, others))}, and the layers of model "
            f"{model} in which xattention chooses keys are {', '.join(map(str, choosing)) or 'none'}; name some of "
            "those"
        )


@dataclass(kw_only=True)
class PrefillJob:
    """One prompt batch to prefill, as one rank gets it.

    Attributes:
        partition: chunks of the padded prompt, one per stage, as `Prefill.split` returned them.
        capacity: tokens for which the KV cache of a rank that decodes has room.
        policies: cache policies of each rank.
        shards: what each rank stores for decoding; None if the last one stores everything.
        reused: keys and values of prompt segments or stored prefixes; the batch then holds the new tokens alone.
        stored: what stages of a chain have stored of the prompts, and send to the others; on all of them. What this
            rank's stage has of it is `reused`, too.
        states: after what each row reuses, in layers that hold one; a forward changes them. None: there is nothing.
        chunk_tokens: tokens that are computed at a time on one rank that has the whole prompt; None is all of them.
        rows_by_memory: tokens of each row for which a layer's activations have room; None is all of them.
        stops: index in the padded batch -> rows whose states before it are kept; on all stages of a chain.
        gives_new: fill `given` of the result on the rank that decodes.
        texts: whole prompts, if some of their tokens are reused and policies decide on all.
        scorer: of this rank's part of the tokens; None: they are not scored.
        handovers: row -> what hands its prompt over, on a rank that has all keys and values.
        hands_over: as of `PrefillPlan`.
        record: record the timeline of this rank.
        meanwhile: what the rank does besides; None is nothing.
    """

    model: Model
    ranks: Ranks
    batch: PromptBatch
    partition: ContextPartition
    capacity: int
    options: PrefillOptions
    policies: RankPolicies = field(default_factory=RankPolicies)
    shards: Mapping[int, Shard] | None = None
    reused: ReusedKV | None = None
    stored: StoredPrefix | None = None
    states: States | None = None
    chunk_tokens: int | None = None
    rows_by_memory: int | None = None
    stops: Mapping[int, Sequence[int]] = field(default_factory=dict)
    gives_new: bool = False
    texts: PromptBatch | None = None
    scorer: PromptScorer | None = None
    handovers: Mapping[int, Handover] = field(default_factory=dict)
    hands_over: bool = False
    record: bool = False
    meanwhile: InterleavedWork | None = None

    @property
    def row_tokens(self) -> int | None:
        """Most tokens of each row that a layer computes at a time; None is all."""
        asked = self.options.row_tokens
        return self.rows_by_memory if asked is None else asked or None

    @property
    def shard(self) -> Shard | None:
        """The shard that this rank's stage stores for decoding, if each stage stores its own."""
        return None if self.shards is None else self.shards.get(self.ranks.stage)

    @property
    def own_policies(self) -> RankPolicies:
        """The policies as this rank applies them: to all tokens, or to its own ones."""
        if self.shard is None:
            return self.policies
        is_last = self.ranks.stage == self.partition.chain[-1]
        return self.policies.of_part(self.shard.part(self.batch.pads), is_last=is_last)

    @property
    def own_tokens(self) -> int:
        """Tokens of the padded prompt that this rank's policies speak of."""
        return self.batch.num_tokens if self.shard is None else len(self.shard.chunk)

    @cached_property
    def streaming(self) -> Streaming | None:
        """The heads that stream in the prompt, as the policy names them; None: all see all tokens."""
        if not self.options.streams:
            return None
        return streaming_of(self.policies, self.model, num_tokens=self.batch.num_tokens, pads=self.batch.pads)

    @property
    def own_new_tokens(self) -> int:
        """New tokens that this rank stores, if it decodes."""
        return self.capacity - self.batch.num_tokens if self.shard is None else len(self.shard.own_new)


@dataclass(kw_only=True)
class Prefilled:
    """Result of a prefill on one rank.

    Attributes:
        report: times and bytes of this rank.
        logits_BV: logits of the last token, on the ranks that decode.
        cache: KV cache of the prompt, on the ranks that decode.
        given: keys and values of the tokens that were computed, where `cache` has those that are reused as well, as one
            text, in memory of its own.
        states: index in the padded batch and row -> its states before that token, as rows; see `PrefillJob.stops`.
        is_cancelled: it was not computed to its end; there are no logits and no cache.
        prefixes: of each row, on a rank that decodes, if prefixes are reused.
        spans: timeline of this rank, in seconds of this host's `time.perf_counter`.
        encoded: content keys of the reused segments that this rank encoded for it, as they were not stored.
        recomputed_tokens: blended tokens that this rank computed, as a mean over the layers.
        scores: of each prompt's tokens that this rank has scored, in runs.
    """

    report: RankReport
    logits_BV: Tensor | None = None
    cache: KVStore | None = None
    given: KVStore | None = None
    states: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    is_cancelled: bool = False
    prefixes: list[RowPrefix] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)
    encoded: set[str] = field(default_factory=set)
    recomputed_tokens: float = 0.0
    scores: list[list[PromptLogprobs]] = field(default_factory=list)


class Prefill(ABC):
    """A prefill strategy: how the stages fill the KV cache. It is stateless; one object serves every call."""

    can_run_alone = False
    """Whether one of several stages can compute a prompt alone."""

    @classmethod
    def of(cls, options: PrefillOptions) -> Self:
        """The strategy, with those of the options that its split depends on."""
        return cls()

    @abstractmethod
    def split(self, num_tokens: int, num_stages: int, chosen: Partitioner) -> ContextPartition:
        """Split a prompt into chunks, by the user's `chosen` partitioner or by the strategy's own rule.

        Raises:
            ValueError: the chosen partition does not fit.
        """

    @abstractmethod
    def first_token_stage(self, partition: ContextPartition, num_stages: int) -> int:
        """The stage that computes the first token and decodes."""

    def connect(  # noqa: B027
        self, ranks: Ranks, partition: ContextPartition, options: PrefillOptions, *, stored_on: Sequence[int] = ()
    ) -> None:
        """Create the process groups that the run needs, before the clock starts. Every rank calls it.

        Args:
            stored_on: stages that send what they have stored of the prompts.
        """

    @abstractmethod
    def run(self, job: PrefillJob) -> Prefilled:
        """Run this rank's part of the prefill."""
