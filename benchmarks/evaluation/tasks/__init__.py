"""The table of tasks. To add one: a class, an entry in TASKS here, and its options and name in options.py."""

from __future__ import annotations

from benchmarks.evaluation.tasks.base import Task
from benchmarks.evaluation.tasks.file import FileTask
from benchmarks.evaluation.tasks.key_value import KeyValue
from benchmarks.evaluation.tasks.loss import CopyTask, Perplexity
from benchmarks.evaluation.tasks.retrieval import Needle, Passkey
from benchmarks.evaluation.tasks.ruler.task import Ruler
from benchmarks.evaluation.tasks.throughput import Throughput

TASKS: dict[str, type[Task]] = {
    "perplexity": Perplexity,
    "copy": CopyTask,
    "passkey": Passkey,
    "needle": Needle,
    "ruler": Ruler,
    "key_value": KeyValue,
    "throughput": Throughput,
    "file": FileTask,
}


def kind_of(name: str) -> str:
    """The name in TASKS of a task; that of a file has its path after it."""
    return name.partition(" ")[0]
