"""Base class of tasks: cases measured under every policy, and the combination of their scores."""

# Legend: V vocabulary, S tokens.

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.metrics import Metric
from benchmarks.evaluation.options import EvaluateRun
from benchmarks.harness.lines import Line
from runahead.config import GenerationOptions
from runahead.conversation import Conversation
from runahead.decoding.rows import Decoded
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.report import RetrievalReport
from runahead.retrieval.cache import RetrievedCache

Case = dict[str, Any]
"""Fields, as JSON, that identify one measurement within its task."""

PROBE_TOKENS = 16
"""Tokens generated after a text only to measure the time per token."""
COST_OF_NEW = 16
"""Estimated cost of one generated token, in tokens of a prompt, for the time left in the progress bar."""


@dataclass(frozen=True)
class KVUse:
    """KV cache use after the context.

    Attributes:
        kv_bytes: bytes allocated where the model computes, those of indices among them.
        host_bytes: bytes in the pool from which a policy retrieves; 0 under other policies.
        full_kv_bytes: bytes of a full cache.
        num_tokens: tokens of the context.
        kept_tokens: tokens kept, per layer.
    """

    kv_bytes: int
    full_kv_bytes: int
    num_tokens: int
    kept_tokens: list[int]
    host_bytes: int = 0

    @classmethod
    def measured(cls, now: Conversation) -> KVUse:
        host_bytes = now.cache.retrieval.host_bytes if isinstance(now.cache, RetrievedCache) else 0
        return cls(now.kv_bytes, now.full_kv_bytes, now.num_tokens, now.kept_tokens, host_bytes)

    def seen_share(self, answered: Conversation) -> float:
        """Share of the context that attention of generated tokens saw, a mean over layers.

        Args:
            answered: the conversation in which tokens were generated, by whatever it retrieved for them. A layer that
                retrieved nothing was seen whole.
        """
        cache = answered.cache
        return self.seen_share_of(cache.retrieval.report() if isinstance(cache, RetrievedCache) else None)

    @staticmethod
    def hit_mass(answered: Conversation) -> float | None:
        """Share of attention that fetched tokens received, a mean over the layers that retrieve; None if not sampled.

        Args:
            answered: as in `seen_share`.
        """
        if not isinstance(answered.cache, RetrievedCache):
            return None
        report = answered.cache.retrieval.report()
        pairs = zip(report.fetched_share, report.hit_mass, strict=True)
        masses = [mass for share, mass in pairs if share is not None and mass is not None]
        return mean(masses) if masses else None

    def seen_share_of(self, report: RetrievalReport | None) -> float:
        """`seen_share` by these statistics of retrieval; None are those of a policy that does not retrieve."""
        kept = [tokens / self.num_tokens for tokens in self.kept_tokens]
        fetched: Sequence[float | None] = [None] * len(kept) if report is None else report.fetched_share
        return mean(share * (1.0 if of_it is None else of_it) for share, of_it in zip(kept, fetched, strict=True))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one case under one policy.

    Attributes:
        score: in the task's metric.
        seen_share: share of the context that attention of generated tokens saw; see `KVUse.seen_share`.
        weight: weight of the score when cases are combined.
        ttft_s: seconds until the first token after the context could be chosen.
        tpot_s: seconds per token after the first, or None.
        details: further values for the reader.
    """

    score: float
    seen_share: float
    weight: float = 1.0
    kv: KVUse
    ttft_s: float
    tpot_s: float | None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The loaded model and the ranks, on which cases are measured."""

    model: Model
    ranks: Ranks


class Task(ABC):
    """A measurement of policies. Construction checks the options, before the model is loaded.

    Attributes:
        needs_text: whether the task needs the user's text.
        cases: the cases to measure, in order.
        settings: options that all cases share and that affect their scores, as JSON.
    """

    metric: Metric
    needs_text: ClassVar[bool] = False
    needs_tokenizer: ClassVar[bool] = True
    cases: list[Case]
    settings: dict[str, Any]

    @abstractmethod
    def __init__(self, run: EvaluateRun, material: Material) -> None:
        """Raises: ValueError: the options do not fit the text or the model."""

    def check(self, contender: Contender, num_layers: int) -> None:  # noqa: B027 (most know without the policy)
        """Raise a ValueError if the model has too few positions for this task under this policy."""

    def prepare(self, runtime: Runtime, done: Sequence[Line]) -> None:  # noqa: B027 (most know all from the options)
        """Find out, before the first measurement, what depends on the model.

        Args:
            done: the task's lines of an evaluation that was interrupted.
        """

    @abstractmethod
    def cost(self, case: Case) -> float:
        """Estimated time of a case, in tokens of a prompt."""

    @abstractmethod
    def run(self, runtime: Runtime, contender: Contender, case: Case) -> Outcome:
        """Measure one case under one policy."""

    def run_all(
        self, runtime: Runtime, contenders: Sequence[Contender], case: Case
    ) -> Iterator[tuple[Contender, Outcome]]:
        """Measure one case under several policies; a task may share what they have in common."""
        for contender in contenders:
            yield contender, self.run(runtime, contender, case)


def now_s(device: torch.device) -> float:
    """Current time in seconds, after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def feed_timed(conversation: Conversation, ids: Sequence[int], *, cut_back: bool = True) -> float:
    """Feed one row of tokens, and return the seconds that it took."""
    device = conversation.model.device
    ids_1C = torch.tensor([ids])
    began_s = now_s(device)
    conversation.feed(ids_1C, cut_back=cut_back)
    return now_s(device) - began_s


def tpot_s(decoded: Decoded) -> float | None:
    """Seconds per token after the first; None if there is none."""
    if decoded.num_steps < 2:
        return None
    return (decoded.last_token_s - decoded.first_token_s) / (decoded.num_steps - 1)


def probe_tpot_s(conversation: Conversation) -> float | None:
    """Seconds per token of a few tokens generated after the conversation so far; None if there are too few."""
    return tpot_s(conversation.generate(GenerationOptions(max_new_tokens=PROBE_TOKENS, ignore_eos=True)))


@torch.inference_mode()
def nll_S(conversation: Conversation, ids: Sequence[int], *, follows: bool = False) -> Tensor:  # noqa: N802
    """Negative log-likelihood of each of these tokens as a continuation of the one row, in nats, on the CPU.

    In an empty conversation the first token has no likelihood and is left out.

    Args:
        follows: append the tokens but the last one to the conversation, as if they had been generated; by default it
            stays as it is.
    """
    parts = [] if conversation.logits_BV is None else [conversation.logits_BV]
    if len(ids) > 1:
        see = conversation.follow if follows else conversation.peek
        parts.append(see(torch.tensor([ids[:-1]]))[0])
    if not parts:
        return torch.empty(0)
    logits_SV = torch.cat(parts)
    targets_S = torch.tensor(ids[len(ids) - len(logits_SV) :], device=logits_SV.device)
    return torch.nn.functional.cross_entropy(logits_SV, targets_S, reduction="none").float().cpu()
