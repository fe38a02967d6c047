"""Losses of methods over those of the full cache, on the same samples: tables of docs/studies/quality.md.

A loss is in nats per token: of a passage that comes again (copy), of the text that follows (text), and of the value of
one key among many (key -> value).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.evaluation.difference import Difference
from benchmarks.evaluation.summary import FULL
from benchmarks.harness.lines import Line, measured
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.quality.methods import FAMILIES, SHARES, Method, Settings

MEASURES: dict[str, tuple[str, Callable[[Line], float]]] = {
    "copy": ("copy", lambda line: line["details"]["nll"]),
    "text": ("copy", lambda line: line["details"]["following_nll"]),
    "key -> value": ("key_value", lambda line: line["details"]["nll"]),
}
"""Name of a loss -> task, and the loss of a line."""
TITLES = {"dropping": "Policies that drop, merge or share", "retrieving": "Policies that retrieve"}


@dataclass(frozen=True, kw_only=True)
class AtShare:
    """A method at one share of the context.

    Attributes:
        losses: differences to the full cache's, by measure.
        kept_share: bytes of keys, values and indices over those of the full cache.
        seen_share: share of the context that attention saw.
        hit_mass: share of exact attention that fetched tokens would receive; None if nothing is fetched.
        samples: number of samples, by measure.
    """

    losses: dict[str, Difference]
    kept_share: float
    seen_share: float
    hit_mass: float | None
    samples: dict[str, int]


Compared = dict[Method, list[AtShare | None]]
"""Loss of each method at each share; None where nothing was measured."""


def settings(found: Sequence[Line], family: str) -> list[list[Line]]:
    """Lines of a family and of the full cache that can be compared: per model and length, those of the newest samples.

    A length is one with the next longer one that is less than 1.4 times as long: a copy and a list of keys differ.
    """
    of_methods = [entry for method in FAMILIES[family] for entry in method.entries]
    by_model: dict[str, list[Line]] = {}
    for line in found:
        if line["task"] in {task for task, _ in MEASURES.values()}:
            by_model.setdefault(line["model"], []).append(line)
    made = []
    for lines in (alike for of_model in by_model.values() for alike in _by_length(of_model)):
        newest = {line["task"]: samples_of(line) for line in lines if line["policy_settings"] in of_methods}
        if newest:
            made.append([line for line in lines if newest.get(line["task"]) == samples_of(line)])
    return made


def _by_length(lines: Sequence[Line]) -> list[list[Line]]:
    shortest = dict[int, int]()
    before = first = 0
    for num_tokens in sorted({line["num_tokens"] for line in lines}):
        first = first if num_tokens < 1.4 * before else num_tokens
        shortest[num_tokens], before = first, num_tokens
    made: dict[int, list[Line]] = {}
    for line in lines:
        made.setdefault(shortest[line["num_tokens"]], []).append(line)
    return list(made.values())


def full_losses(lines: Sequence[Line]) -> dict[str, dict[str, Line]]:
    """Lines of the full cache by measure and sample."""
    full = [line for line in lines if line["policy"] == FULL]
    return {
        name: {sample_of(line): line for line in full if line["task"] == task} for name, (task, _) in MEASURES.items()
    }


def compared(lines: Sequence[Line], family: str) -> Compared:
    """All methods of a family that were measured in a setting."""
    full = full_losses(lines)
    made: Compared = {}
    for method in FAMILIES[family]:
        lacking = len(SHARES[family]) - len(method.entries)
        made[method] = [*(_at_share(entry, lines, full) for entry in method.entries), *[None] * lacking]
    return {method: shares for method, shares in made.items() if any(shares)}


def heading(lines: Sequence[Line]) -> str:
    """Model and length of a setting."""
    of_copy = next((line for line in lines if line["task"] == "copy"), None)
    where = [f"{of_copy['num_tokens']:,} tokens"] if of_copy else []
    where += sorted({f"{line['details']['pairs']} keys" for line in lines if line["task"] == "key_value"})
    return ", ".join([lines[-1]["model"], *where])


def _at_share(entry: Settings, lines: Sequence[Line], full: dict[str, dict[str, Line]]) -> AtShare | None:
    own = {(line["task"], sample_of(line)): line for line in lines if line["policy_settings"] == entry}
    losses, samples = {}, {}
    for name, (task, loss) in MEASURES.items():
        pairs = [(own[task, sample], line) for sample, line in full[name].items() if (task, sample) in own]
        if pairs:
            losses[name] = Difference.with_interval([loss(line) - loss(other) for line, other in pairs])
            samples[name] = len(pairs)
    if not losses:
        return None
    masses = [line["details"]["hit_mass"] for line in own.values() if line["details"].get("hit_mass") is not None]
    return AtShare(
        losses=losses,
        kept_share=mean((line["kv_bytes"] + line["host_bytes"]) / line["full_kv_bytes"] for line in own.values()),
        seen_share=mean(line["seen_share"] for line in own.values()),
        hit_mass=mean(masses) if masses else None,
        samples=samples,
    )


def tables(found: Sequence[Line]) -> str:
    """A table of each family and setting that was measured."""
    return "\n".join(_table(lines, family) for family in FAMILIES for lines in settings(found, family))


def _table(lines: Sequence[Line], family: str) -> str:
    told = ", ".join(
        f"{name} {mean(MEASURES[name][1](line) for line in of_full.values()):.2f}"
        for name, of_full in full_losses(lines).items()
        if of_full
    )
    about = f"**{TITLES[family]}, {heading(lines)}**; the full cache's losses: {told}; {measured(lines)}"
    return f"{about}\n\n{markdown(rows(compared(lines, family), family))}"


def rows(methods: Compared, family: str) -> Rows:
    """A row per method, in Markdown's cells, the smallest loss of copies at the middle share first."""
    shares = [f"{100 * share:g}%" for share in SHARES[family]]
    columns = [name for name in MEASURES if any(name in each.losses for at in methods.values() for each in at if each)]
    extra = ["index", "saw, %", "recall, %"] if family == "retrieving" else ["kept, %"]
    made: Rows = [("policy", *extra, *(f"{name}, {share}" for name in columns for share in shares), "n")]
    for method, at in sorted(methods.items(), key=lambda item: _order(item[1])):
        cells = [f"`{method.name}`", *_bytes(at, family)]
        cells += [_loss(each, name) for name in columns for each in at]
        counts = [
            max((each.samples.get(name, 0) for each in at if each), default=0) for name in ("copy", "key -> value")
        ]
        made.append((*cells, " + ".join(map(str, counts))))
    return made


def _bytes(at: Sequence[AtShare | None], family: str) -> list[str]:
    def each(value: Callable[[AtShare], float | None]) -> str:
        values = [None if found is None else value(found) for found in at]
        return " / ".join("-" if value is None else f"{100 * value:.0f}" for value in values)

    if family == "retrieving":
        index = next(found.kept_share - 1 for found in at if found)
        return [f"{index:.0%}", each(lambda found: found.seen_share), each(lambda found: found.hit_mass)]
    return [each(lambda found: found.kept_share)]


def _loss(at: AtShare | None, name: str) -> str:
    """A mean difference, and half of its interval."""
    if at is None or name not in at.losses:
        return "-"
    loss = at.losses[name]
    told = f"{loss.mean:+.2f}"
    return told if loss.interval is None else f"{told} ±{(loss.interval[1] - loss.interval[0]) / 2:.2f}"


def _order(at: Sequence[AtShare | None]) -> float:
    of_copy = [each.losses["copy"].mean for each in at if each and "copy" in each.losses]
    return of_copy[len(of_copy) // 2] if of_copy else float("inf")


def samples_of(line: Line) -> str:
    """The same for lines whose samples can be compared: model, task and its options, number of keys, text."""
    return f"{line['model']} {line['task']} {line['task_settings']} {line['case'].get('pairs')} {line['text']}"


def sample_of(line: Line) -> str:
    return str(line["case"])
