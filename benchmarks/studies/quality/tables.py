"""Tables of docs/studies/quality.md: one per model, protocol and length, by policy and budget; then those of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.evaluation.contenders import budget_text
from benchmarks.evaluation.difference import Difference, in_points
from benchmarks.evaluation.options import RULER_TASKS, TASK_NAMES
from benchmarks.evaluation.summary import FULL
from benchmarks.harness.lines import Line, measured
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.quality import losses
from benchmarks.studies.quality.paired import PolicyRow, Setting, over_scorers, rows, settings

PROTOCOLS = {"separate": "question not seen", "with_context": "question seen"}
ORDER = (*RULER_TASKS, *TASK_NAMES)
"""Order of the columns."""


def tables(found: list[Line]) -> str:
    """All tables, each with the number of its questions and the commits that measured it."""
    parts = []
    for setting, group, of_setting in compared(found):
        parts.append(with_heading(setting, group, of_setting))
        if wrapped := over_scorers(group):
            parts.append(f"The same questions, over the scorer's own choice:\n\n{markdown(scorers_table(wrapped))}")
    return "\n".join([*parts, losses.tables(found)])


def compared(found: list[Line]) -> Iterator[tuple[Setting, list[Line], list[PolicyRow]]]:
    """Each setting in which the full cache answered, with its lines and rows."""
    for setting, group in settings(found).items():
        of_setting = rows(group)
        if any(row.policy == FULL for row in of_setting):
            yield setting, group, of_setting


def with_heading(setting: Setting, group: Sequence[Line], of_setting: Sequence[PolicyRow]) -> str:
    """A table behind a line with its setting, number of questions, and the dates and commits that measured it."""
    model, protocol, length = setting
    heading = f"**{model}, {PROTOCOLS[protocol]}, {length}**: {num_questions(of_setting)} questions, {measured(group)}"
    return f"{heading}\n\n{markdown(table(of_setting))}"


def num_questions(of_setting: Sequence[PolicyRow]) -> int:
    """Questions of the policy that was asked most."""
    return max(row.pairs for row in of_setting)


def table(of_setting: Sequence[PolicyRow]) -> Rows:
    """Rows of one setting, in Markdown's cells, with a column for the score in each task."""
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
    return difference.told(in_points)


def nats(difference: Difference | None) -> str:
    """A difference of losses in nats per token, with its interval; "-" for none."""
    return "-" if difference is None else difference.told("{:+.2f}".format)
