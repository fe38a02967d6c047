"""A finding: what one check measured, what bounds it, and what that means in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    """Outcome of a check: within its bound, short of it, failed, a figure without a bound, or not run."""

    good = "good"
    short = "short"
    failed = "failed"
    noted = "noted"
    skipped = "skipped"


MARKS = {
    Verdict.good: "ok",
    Verdict.short: "short",
    Verdict.failed: "FAILED",
    Verdict.noted: "-",
    Verdict.skipped: "skip",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check.

    Attributes:
        group: section of the page, such as "links".
        name: what was checked.
        measured, bound: values with their units, for readers; "" where there is none.
        words: for a good check what it shows; otherwise the likely cause and the remedy.
    """

    group: str
    name: str
    verdict: Verdict
    measured: str = ""
    bound: str = ""
    words: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict.name}


def worst(findings: Iterable[Finding]) -> Verdict:
    """The most serious verdict: failed, short, or good."""
    verdicts = {finding.verdict for finding in findings}
    return next((each for each in (Verdict.failed, Verdict.short) if each in verdicts), Verdict.good)
