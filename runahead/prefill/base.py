"""What every way to fill the KV cache takes, gives and decides."""

# Legend: B batch, S tokens of the padded prompt, V vocabulary.

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runahead.cache.base import KVStore
from runahead.config import PrefillOptions
from runahead.context import ContextPartition, Partitioner
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.report import RankReport
from runahead.reuse.reused_kv import ReusedKV
from runahead.thinning.rank_policies import RankPolicies
from runahead.timeline.span import Span


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts of different lengths, padded on the left so that they end together."""

    ids_BS: Tensor
    pads: list[int]

    @classmethod
    def of(cls, prompts: list[list[int]], device: torch.device) -> PromptBatch:
        longest = max(len(prompt) for prompt in prompts)
        pads = [longest - len(prompt) for prompt in prompts]
        rows = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]  # any id: pads are not seen
        return cls(ids_BS=torch.tensor(rows, device=device), pads=pads)

    @property
    def num_tokens(self) -> int:
        return self.ids_BS.shape[1]


@dataclass(kw_only=True)
class PrefillJob:
    """One prompt batch to prefill on these ranks.

    Attributes:
        partition: chunks of the padded prompt, as the strategy split it.
        capacity: tokens for which the KV cache of a rank that decodes has room.
        policies: what is computed and kept of the keys and values.
        reused: keys and values that were computed before; the batch holds the new tokens alone.
        chunk_tokens: tokens that are computed at a time where one rank has the whole prompt; None is all of them.
        record: note what this rank does when.
    """

    model: Model
    ranks: Ranks
    batch: PromptBatch
    partition: ContextPartition
    capacity: int
    options: PrefillOptions
    policies: RankPolicies = field(default_factory=RankPolicies)
    reused: ReusedKV | None = None
    chunk_tokens: int | None = None
    record: bool = False


@dataclass(kw_only=True)
class Prefilled:
    """What a rank has after the prefill.

    Attributes:
        report: this rank's part.
        logits_BV: of the last token, on the ranks that decode.
        cache: keys and values of the prompt, on the ranks that decode.
        spans: what this rank did when, in seconds of this host's `time.perf_counter`.
    """

    report: RankReport
    logits_BV: Tensor | None = None
    cache: KVStore | None = None
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def idle(cls, rank: int) -> Prefilled:
        """The part of a rank without tokens."""
        return cls(report=RankReport(rank=rank))


class Prefill(ABC):
    """A way to fill the KV cache. It has no state: one object serves every call."""

    takes_policies = False
    """May cache policies thin out what it computes and keeps?"""

    shares_model = False
    """Every rank holds a share of the weights instead of all of them."""

    def check_config(self, config: Any, num_ranks: int) -> None:  # noqa: B027
        """As `check`, before the weights are loaded. `config` is transformers', of the text model."""

    def check(self, model: Model, num_ranks: int) -> None:  # noqa: B027 (most have nothing to check)
        """Raise a ValueError for a model that cannot be prefilled like this on so many ranks."""

    @abstractmethod
    def split(self, num_tokens: int, num_ranks: int, chosen: Partitioner) -> ContextPartition:
        """The chunks of a prompt: those of the user's `chosen` partitioner, or the strategy's own.

        Raises:
            ValueError: the chosen partition does not fit.
        """

    @abstractmethod
    def first_token_rank(self, partition: ContextPartition, num_ranks: int) -> int:
        """The rank that gets the first token, and streams all tokens."""

    def connect(self, ranks: Ranks, partition: ContextPartition, options: PrefillOptions) -> None:  # noqa: B027
        """Make what the run will need between ranks, before the clock starts. Every rank calls it."""

    @abstractmethod
    def run(self, job: PrefillJob) -> Prefilled:
        """This rank's part."""
