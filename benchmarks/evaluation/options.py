"""The options of launch/evaluate.py: plain dataclasses that check themselves, like those of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from runahead.config import ModelOptions, RanksOptions, choice, require

TASK_NAMES = ("perplexity", "copy", "passkey", "needle", "throughput")


class Question(Enum):
    """When a policy sees the question: in a separate turn after the thinned context, or together with the context."""

    separate = "separate"
    with_context = "with_context"


@dataclass(kw_only=True)
class TextOptions:
    """Text for perplexity, copy and needle: a file in UTF-8; by default the one in examples/."""

    file: str | None = None


@dataclass(kw_only=True)
class PerplexityOptions:
    """Options of perplexity, measured over a text that is read in chunks.

    Attributes:
        tokens: length of a sample; samples follow each other in the text.
        chunk: tokens per forward pass. Each sees what was kept of earlier chunks, and its own chunk up to itself.
    """

    tokens: int = 2048
    samples: int = 1
    chunk: int = 256

    def __post_init__(self) -> None:
        _require_least("perplexity", self, tokens=2, samples=1, chunk=1)


@dataclass(kw_only=True)
class CopyOptions:
    """Options of copy-NLL: a passage, filler text, and the passage again; lengths in tokens."""

    passage: int = 128
    filler: int = 640
    samples: int = 4

    def __post_init__(self) -> None:
        _require_least("copy", self, passage=1, filler=0, samples=1)


@dataclass(kw_only=True)
class RetrievalOptions:
    """Options of retrieval: one fact in a long context.

    Attributes:
        lengths: maximum numbers of tokens of context and question together.
        depths: position of the fact in the context, from 0 (first) to 1 (last).
        samples: facts per length and depth.
        new_tokens: maximum number of tokens of an answer.
    """

    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: int = 1
    question: Question = Question.separate
    new_tokens: int = 8

    def check(self, name: str) -> None:
        """Raise a ValueError for a wrong value; `name` is the task's name in the message."""
        self.question = choice(f"{name}.question", Question, self.question)
        _require_least(name, self, samples=1, new_tokens=2)
        lengths, depths = self.lengths, self.depths
        require(
            min(lengths, default=0) >= 1, f"{name}.lengths", lengths, "must be a list of whole numbers of at least 1"
        )
        in_range = bool(depths) and all(0 <= depth <= 1 for depth in depths)
        require(in_range, f"{name}.depths", depths, "must be a list of shares from 0 to 1")
        self.lengths, self.depths = sorted(set(lengths)), sorted(set(depths))


@dataclass(kw_only=True)
class ThroughputOptions:
    """Options of throughput, measured with the largest batch whose KV cache fits into a budget.

    Attributes:
        prompt_tokens, new_tokens: tokens per row; prompts are random tokens.
        kv_tokens: the budget as tokens of a full cache.
        kv_bytes: the budget as bytes, in place of `kv_tokens`.
        max_batch: maximum number of rows.
        rounds: runs of each policy; policies run in turn (A B C A B C).
    """

    prompt_tokens: int = 512
    new_tokens: int = 256
    kv_tokens: int = 6144
    kv_bytes: int | None = None
    max_batch: int = 64
    rounds: int = 3

    def __post_init__(self) -> None:
        _require_least("throughput", self, prompt_tokens=1, new_tokens=2, max_batch=1, rounds=1)
        if self.kv_bytes is not None:
            _require_least("throughput", self, kv_bytes=1)
            return
        row = self.prompt_tokens + self.new_tokens
        rule = f"must hold at least one row of {row} tokens (throughput.prompt_tokens + throughput.new_tokens)"
        require(self.kv_tokens >= row, "throughput.kv_tokens", self.kv_tokens, rule)


@dataclass(kw_only=True)
class EvaluateRun:
    """Configuration of one run of launch/evaluate.py.

    Attributes:
        policies: one or a list of policies, each a name or a mapping {name: ..., and its options}.
        tasks: names of `TASK_NAMES`.
        budgets: for policies that have one: a whole number is in tokens, a fraction is a share of the prompt.
        report: JSON file for the results; pictures are written next to it.
        lines: JSON lines, one per measurement; measurements already in the file are skipped. By default next to the
            report.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    policies: Any = field(default_factory=lambda: ["full", "pyramidinfer", "snapkv"])
    tasks: Any = field(default_factory=lambda: ["perplexity", "copy", "passkey"])
    budgets: Any = field(default_factory=lambda: [0.2, 0.5, 0.8])
    text: TextOptions = field(default_factory=TextOptions)
    perplexity: PerplexityOptions = field(default_factory=PerplexityOptions)
    copy: CopyOptions = field(default_factory=CopyOptions)
    passkey: RetrievalOptions = field(default_factory=RetrievalOptions)
    needle: RetrievalOptions = field(default_factory=RetrievalOptions)
    throughput: ThroughputOptions = field(default_factory=ThroughputOptions)
    report: str | None = None
    lines: str | None = None

    def __post_init__(self) -> None:
        self.policies, self.tasks, self.budgets = (
            list(value) if isinstance(value, list) else [value] for value in (self.policies, self.tasks, self.budgets)
        )
        require(bool(self.policies), "policies", [], "must name at least one policy, such as policies=[full,snapkv]")
        unknown = [str(name) for name in self.tasks if name not in TASK_NAMES]
        if unknown:
            raise ValueError(f"tasks has {', '.join(unknown)}, which is not one of {', '.join(TASK_NAMES)}")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks=[{','.join(self.tasks)}] must name at least one task, and each only once")
        for budget in self.budgets:
            _check_budget(budget)
        is_unique = len(set(map(repr, self.budgets))) == len(self.budgets)
        require(is_unique, "budgets", self.budgets, "must hold each value only once")
        self.passkey.check("passkey")
        self.needle.check("needle")
        if self.lines is None and self.report is not None:
            stem, dot, ending = self.report.rpartition(".")
            self.lines = f"{stem if dot and '/' not in ending else self.report}.jsonl"
        if self.lines is not None and self.lines == self.report:
            raise ValueError(f"report={self.report} and lines={self.lines} would overwrite each other; rename one")


def _require_least(section: str, options: object, **least: int) -> None:
    for name, bound in least.items():
        value = getattr(options, name)
        require(value >= bound, f"{section}.{name}", value, f"must be at least {bound}")


def _check_budget(budget: Any) -> None:
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not is_number or not (budget >= 1 if isinstance(budget, int) else 0 < budget <= 1):
        raise ValueError(
            f"budgets has {budget}, which is neither a whole number of tokens of at least 1 nor a share in (0, 1]"
        )


def ineffective_settings(run: EvaluateRun) -> list[str]:
    """One sentence per option that was changed from its default and changes nothing in this run."""
    defaults = EvaluateRun()
    sentences = [
        f"{name}.* has no effect without {name} among tasks"
        for name in TASK_NAMES
        if name not in run.tasks and getattr(run, name) != getattr(defaults, name)
    ]
    if run.text.file is not None and not {"perplexity", "copy", "needle"} & set(run.tasks):
        sentences.append("text.file has no effect without perplexity, copy or needle among tasks")
    return sentences
