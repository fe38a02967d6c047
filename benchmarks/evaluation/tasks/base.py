"""What a task is: cases, each measured under every policy, and a score that cases are combined to."""

# Legend: V vocabulary, S tokens.

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.options import EvaluateRun
from runahead.config import GenerationOptions
from runahead.conversation import Conversation
from runahead.decoding.decode import Decoded
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks

Case = dict[str, Any]
"""What tells a measurement from the others of its task, as JSON."""

PROBE_TOKENS = 16
"""Tokens that are generated after a text only to see how long each takes."""
COST_OF_NEW = 16
"""Tokens of a prompt that take about as long as one new token, for the time left."""


@dataclass(frozen=True, kw_only=True)
class KVUse:
    """KV after the context.

    Attributes:
        kv_bytes: allocated.
        full_kv_bytes: of a cache that keeps all.
        num_tokens: of the context.
        kept_tokens: per layer.
    """

    kv_bytes: int
    full_kv_bytes: int
    num_tokens: int
    kept_tokens: list[int]

    @classmethod
    def of(cls, conversation: Conversation) -> KVUse:
        return cls(
            kv_bytes=conversation.kv_bytes,
            full_kv_bytes=conversation.full_kv_bytes,
            num_tokens=conversation.num_tokens,
            kept_tokens=conversation.kept_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case under one policy.

    Attributes:
        score: in the task's metric.
        weight: of the score when cases are combined.
        ttft_s: until the first token after the context could be chosen.
        tpot_s: per token after the first.
        details: whatever else a reader may want to know.
    """

    score: float
    weight: float = 1.0
    kv: KVUse
    ttft_s: float
    tpot_s: float | None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What cases run on."""

    model: Model
    ranks: Ranks


class Task(ABC):
    """One way to measure policies. It is made, and finds what is wrong, before the model is loaded.

    Attributes:
        metric: what its scores are.
        lower_is_better: of two scores.
        needs_text: of the user.
    """

    metric: ClassVar[str]
    lower_is_better: ClassVar[bool] = False
    needs_text: ClassVar[bool] = False
    needs_tokenizer: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, run: EvaluateRun, material: Material) -> None:
        """Raises: ValueError: the options do not fit the text or the model."""

    def check(self, contender: Contender, num_layers: int) -> None:  # noqa: B027 (most know without the policy)
        """Raise a ValueError if the model has too few positions for this task under this policy."""

    @property
    @abstractmethod
    def cases(self) -> list[Case]:
        """Those to measure, in order."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Options that all cases share and that decide their scores, as JSON."""

    @abstractmethod
    def cost(self, case: Case) -> float:
        """About how long a case takes, as tokens of a prompt."""

    @abstractmethod
    def run(self, runtime: Runtime, contender: Contender, case: Case) -> Outcome:
        """Measure."""

    @staticmethod
    def combine(scores: Sequence[float], weights: Sequence[float]) -> float:
        """One score of several cases: their weighted mean."""
        return sum(score * weight for score, weight in zip(scores, weights, strict=True)) / sum(weights)


def now_s(device: torch.device) -> float:
    """Seconds, once the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def feed_timed(conversation: Conversation, ids: Sequence[int], *, cut_back: bool = True) -> float:
    """Feed one row of tokens; the seconds that it took."""
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
    """Seconds per token that would be generated next."""
    return tpot_s(conversation.generate(GenerationOptions(max_new_tokens=PROBE_TOKENS, ignore_eos=True)))


@torch.inference_mode()
def nll_S(conversation: Conversation, ids: Sequence[int]) -> Tensor:  # noqa: N802
    """Negative log-likelihood in nats, on the CPU, of each of these tokens if they came next in the one row.

    A conversation that has not begun cannot tell that of the first token, which is left out.
    """
    parts = [] if conversation.logits_BV is None else [conversation.logits_BV]
    if len(ids) > 1:
        parts.append(conversation.peek(torch.tensor([ids[:-1]]))[0])
    if not parts:
        return torch.empty(0)
    logits_SV = torch.cat(parts)
    targets_S = torch.tensor(ids[len(ids) - len(logits_SV) :], device=logits_SV.device)
    return torch.nn.functional.cross_entropy(logits_SV, targets_S, reduction="none").float().cpu()
