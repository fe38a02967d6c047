"""The options of launch/evaluate.py: plain dataclasses that check themselves, like those of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from launch.inputs.policies import ineffective_options
from launch.program.typed_options import counted, typed
from runahead.config import ModelOptions, RanksOptions, choice, not_one_of, require

TASK_NAMES = ("perplexity", "copy", "passkey", "needle", "ruler", "key_value", "throughput", "file")
RULER_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
"""Tasks of RULER, as published."""
RULER_SETS = ("niah_multivalue", "niah_multiquery", "cwe", "fwe")
"""Tasks that ask for several strings, which are right in any order."""
RULER_FILES = {"qa_1": "squad", "qa_2": "hotpotqa"}
"""Option that names the file of a task's questions."""
TEXT_TASKS = ("perplexity", "copy", "needle", "ruler")
"""Tasks that read the text of text.file."""


class Question(Enum):
    """Place of the question: in a separate turn after the thinned context, or together with the context."""

    separate = "separate"
    with_context = "with_context"


@dataclass(kw_only=True)
class TextOptions:
    """Text for perplexity, copy, needle and ruler: a file in UTF-8; by default the one in examples/."""

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
    """Options of copy-NLL: a passage, filler text, and the passage again; lengths in tokens.

    Attributes:
        following: tokens of the text that follow the filler, whose loss is measured, too, in place of the passage.
        timed: generate a few tokens after each sample to measure the time per token.
    """

    passage: int = 128
    filler: int = 640
    samples: int = 4
    following: int = 0
    timed: bool = True

    def __post_init__(self) -> None:
        _require_least("copy", self, passage=1, filler=0, samples=1, following=0)


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
        self.lengths = _whole_numbers(f"{name}.lengths", self.lengths)
        in_range = bool(self.depths) and all(0 <= depth <= 1 for depth in self.depths)
        require(in_range, f"{name}.depths", self.depths, "must be a list of shares from 0 to 1")
        self.depths = sorted(set(self.depths))


@dataclass(kw_only=True)
class RulerOptions:
    """Options of ruler: the tasks of RULER (Hsieh et al., 2024, arXiv 2404.06654).

    Attributes:
        tasks: names of `RULER_TASKS`; by default those that need no file of questions.
        lengths: maximum numbers of tokens of context and question together.
        samples: questions per task and length.
        new_tokens: maximum number of tokens of an answer; None: the published one of each task. With 0 none is
            generated, but in `RULER_SETS`: an answer is what the model says up to its first difference from a right
            answer, which takes little time and finds no more than generating does.
        squad: SQuAD 2.0's dev-v2.0.json, whose questions are qa_1.
        hotpotqa: HotpotQA's hotpot_dev_distractor_v1.json, whose questions are qa_2.
    """

    tasks: list[str] = field(default_factory=lambda: [name for name in RULER_TASKS if name not in RULER_FILES])
    lengths: list[int] = field(default_factory=lambda: [4096])
    samples: int = 10
    question: Question = Question.separate
    new_tokens: int | None = None
    squad: str | None = None
    hotpotqa: str | None = None

    def __post_init__(self) -> None:
        self.question = choice("ruler.question", Question, self.question)
        _require_least("ruler", self, samples=1)
        if self.new_tokens is not None:
            _require_least("ruler", self, new_tokens=0)
        self.lengths = _whole_numbers("ruler.lengths", self.lengths)
        unknown = [name for name in self.tasks if name not in RULER_TASKS]
        if unknown:
            raise ValueError(f"ruler.tasks has {unknown[0]}, which {not_one_of(unknown[0], RULER_TASKS)}")
        require(bool(self.tasks), "ruler.tasks", self.tasks, "must name at least one task")
        self.tasks = [name for name in RULER_TASKS if name in self.tasks]


@dataclass(kw_only=True)
class KeyValueOptions:
    """Options of key_value: the value of one key of a JSON object of random keys and values.

    Attributes:
        pairs: numbers of keys; None: the number at which the full cache answers about half of the questions.
        samples: questions per number of keys.
        search_samples: questions by which a number of keys is judged while it is searched.
        most_tokens: largest number of tokens of context and question while it is searched.
    """

    pairs: list[int] | None = None
    samples: int = 20
    question: Question = Question.separate
    search_samples: int = 8
    most_tokens: int = 8192

    def __post_init__(self) -> None:
        self.question = choice("key_value.question", Question, self.question)
        _require_least("key_value", self, samples=1, search_samples=1, most_tokens=1)
        if self.pairs is not None:
            self.pairs = _whole_numbers("key_value.pairs", self.pairs)


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


class Score(Enum):
    """How an answer to a question of a user's own is scored."""

    exact_match = "exact_match"
    contained = "contained"
    f1 = "f1"
    perplexity = "perplexity"


@dataclass(kw_only=True)
class FileTaskOptions:
    """An entry {name:file,...} of tasks=: questions of a user's own, a JSON object per line of a file.

    Attributes:
        path: the file. A line has `prompt`, `question`, `answers` and perhaps `metric`, or LongBench's fields.
        metric: how all answers are scored, whatever the lines say.
        new_tokens: maximum number of tokens of an answer; by default LongBench's for its lines, else 32.
        most_tokens: longest prompt with its question; longer ones lose their middle, as in LongBench.
        samples: number of questions, from the first on; None: all.
    """

    path: str | None = None
    metric: Score | None = None
    question: Question = Question.separate
    new_tokens: int | None = None
    most_tokens: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.path is None:
            raise ValueError("tasks has file without a path; give {name:file,path:<jsonl>}")
        for name in ("new_tokens", "most_tokens", "samples"):
            if getattr(self, name) is not None:
                _require_least("tasks", self, **{name: 1})

    def __str__(self) -> str:
        """The task's name in tables and lines."""
        return f"file {self.path}"


@dataclass(kw_only=True)
class EvaluateRun:
    """Configuration of one run of launch/evaluate.py.

    Attributes:
        policies: one or a list of policies, each a name or a mapping {name: ..., and its options}.
        tasks: names of `TASK_NAMES`, and {name:file,path:...} with further options of `FileTaskOptions`.
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
    ruler: RulerOptions = field(default_factory=RulerOptions)
    key_value: KeyValueOptions = field(default_factory=KeyValueOptions)
    throughput: ThroughputOptions = field(default_factory=ThroughputOptions)
    report: str | None = None
    lines: str | None = None

    def __post_init__(self) -> None:
        self.policies, self.tasks, self.budgets = (
            list(value) if isinstance(value, list) else [value] for value in (self.policies, self.tasks, self.budgets)
        )
        require(bool(self.policies), "policies", [], "must name at least one policy, such as policies=[full,snapkv]")
        self.tasks = [_task(entry) for entry in self.tasks]
        names = list(map(str, self.tasks))
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tasks=[{','.join(names)}] must name at least one task, and each only once")
        self.budgets = counted(self.budgets)
        for budget in self.budgets:
            _check_budget(budget)
        is_unique = len(set(map(repr, self.budgets))) == len(self.budgets)
        require(is_unique, "budgets", self.budgets, "must hold each value only once")
        self.passkey.check("passkey")
        self.needle.check("needle")
        if self.lines is None and self.report is not None:
            stem, dot, ending = self.report.rpartition(".")
            self.lines = f"{stem if dot and '/' not in ending else self.report}.jsonl"


def _task(entry: Any) -> str | FileTaskOptions:
    """An entry of tasks=. Raises: ValueError."""
    if isinstance(entry, FileTaskOptions):
        return entry
    given = dict(entry) if isinstance(entry, dict) else {"name": entry}
    name = given.pop("name", None)
    if name == "file":
        return typed(given, FileTaskOptions, "tasks")
    if not isinstance(name, str) or name not in TASK_NAMES:
        raise ValueError(f"tasks has {entry}, which {not_one_of(name, TASK_NAMES)}")
    if given:
        raise ValueError(f"tasks has {entry}; options of {name} are {name}.{next(iter(given))}=... and so on")
    return name


def _require_least(section: str, options: object, **least: int) -> None:
    for name, bound in least.items():
        value = getattr(options, name)
        require(value >= bound, f"{section}.{name}", value, f"must be at least {bound}")


def _whole_numbers(option: str, values: list[int]) -> list[int]:
    """The values in order, each once. Raises: ValueError."""
    require(min(values, default=0) >= 1, option, values, "must be a list of whole numbers of at least 1")
    return sorted(set(values))


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
        if name != "file" and name not in run.tasks and getattr(run, name) != getattr(defaults, name)
    ]
    if run.text.file is not None and not any(task in run.tasks for task in TEXT_TASKS):
        names = f"{', '.join(TEXT_TASKS[:-1])} or {TEXT_TASKS[-1]}"
        sentences.append(f"text.file has no effect without {names} among tasks")
    sentences += [
        f"ruler.{option} has no effect without {task} among ruler.tasks"
        for task, option in RULER_FILES.items()
        if getattr(run.ruler, option) is not None and "ruler" in run.tasks and task not in run.ruler.tasks
    ]
    for policy in run.policies:
        sentences += ineffective_options(policy, "policies", has_turns=True)
    return sentences
