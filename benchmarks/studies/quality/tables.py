"""Tables of docs/quality.md: one per model, protocol and length, a row per policy and budget; then those of losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.evaluation.contenders import budget_text
from benchmarks.evaluation.options import RULER_TASKS, TASK_NAMES
from benchmarks.evaluation.summary import FULL
from benchmarks.harness.lines import Line
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.quality import losses
from benchmarks.studies.quality.paired import Difference, PolicyRow, over_scorers, rows, settings

PROTOCOLS = {"separate": "question not seen", "with_context": "question seen"}
ORDER = (*RULER_TASKS, *TASK_NAMES)
"""Order of the columns."""


def tables(found: list[Line]) -> str:
    """All tables, each with the number of its questions and the commits that measured it."""
    parts = []
    for (model, protocol, length), group in settings(found).items():
        of_setting = rows(group)
        if not any(row.policy == FULL for row in of_setting):
            continue
        commits = ", ".join(sorted({str(line["commit"]) for line in group}))
        questions = max(row.pairs for row in of_setting)
        heading = f"**{model}, {PROTOCOLS[protocol]}, {length}**: {questions} questions, commit {commits}"
        parts.append(f"{heading}\n\n{markdown(table(of_setting))}")
        if wrapped := over_scorers(group):
            parts.append(f"The same questions, over the scorer's own choice:\n\n{markdown(scorers_table(wrapped))}")
    return "\n".join([*parts, losses.tables(found)])


def table(of_setting: Sequence[PolicyRow]) -> Rows:
    """Rows of one setting, in Markdown's cells."""
    kinds = sorted({kind for row in of_setting for kind in row.scores}, key=ORDER.index)
    made: Rows = [("policy", "budget", "kept", "saw", *kinds, "score over full", "loss over full", "prompt", "n")]
    for row in of_setting:
        scores = (f"{row.scores[kind]:.0%}" if kind in row.scores else "-" for kind in kinds)
        prompt = "-" if row.ttft is None else f"{row.ttft:.1f} x"
        over = ("", "", "") if row.policy == FULL else (points(row.score), nats(row.loss), prompt)
        shares = f"{row.kept_share:.0%}", f"{row.seen_share:.0%}"
        made.append((f"`{row.policy}`", budget_text(row.budget), *shares, *scores, *over, str(row.pairs)))
    return made


def scorers_table(wrapped: Sequence[PolicyRow]) -> Rows:
    """Rows of policies that wrap a scorer, in Markdown's cells."""
    made: Rows = [("policy", "budget", "score over its scorer", "loss over its scorer", "n")]
    for row in wrapped:
        over = points(row.score), nats(row.loss)
        made.append((f"`{row.policy}`", budget_text(row.budget), *over, str(row.pairs)))
    return made


def points(difference: Difference) -> str:
    """A difference of scores in percentage points, with its interval."""
    return told(difference, lambda value: f"{100 * value:+.0f}")


def nats(difference: Difference) -> str:
    """A difference of losses in nats per token, with its interval."""
    return told(difference, lambda value: f"{value:+.2f}")


def told(difference: Difference, number: Callable[[float], str]) -> str:
    """A difference with its interval, if it has one; `number` writes each of the three."""
    mean = number(difference.mean)
    if difference.interval is None:
        return mean
    low, high = difference.interval
    return f"{mean} ({number(low)} to {number(high)})"
