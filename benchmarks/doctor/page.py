"""The doctor's page as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from benchmarks.doctor.findings import MARKS, Verdict
from launch.program.text_table import text_table

WIDTH = 110
"""Characters of a line of words."""

SUMMARIES = {
    "good": "This machine can do it, and nothing falls short of its bound.",
    "short": "This machine can do it; what falls short of its bound:",
    "failed": "Something has to be mended first:",
}
"""First sentence of the page, by verdict."""


def as_text(page: dict[str, Any], summaries: Mapping[str, str] = SUMMARIES) -> str:
    """The page: what was examined, what falls short and why, then every check by group.

    Args:
        summaries: first sentences, by verdict.
    """
    findings = page["findings"]
    hosts = ", ".join(page["hosts"])
    hardware = next(iter(page["hosts"].values()))
    gpus = sorted({gpu for each in page["hosts"].values() for gpu in each["gpus"]})
    processor = ", ".join(gpus) if gpus else f"{hardware['cores']} cores of {hardware['cpu']}"
    probe = page["probe"]
    model = "" if probe is None else f"; {probe['model']} in {probe['dtype']} over {probe['backend']}"
    ranks = f"{page['ranks']} rank{'s' * (page['ranks'] > 1)}"
    text = f"{ranks} on {hosts}: {processor}{model}\n"
    text += f"{page['date']}, commit {page['commit'] or 'unknown'}, {page['seconds']:.0f} s\n\n"
    text += summaries[page["verdict"]] + "\n"
    for finding in findings:
        if finding["verdict"] in (Verdict.short.name, Verdict.failed.name):
            text += _item(f"{finding['group']}, {finding['name']}", finding)
    for group in dict.fromkeys(finding["group"] for finding in findings):
        text += f"\n{group}\n"
        rows = [["", "check", "measured", "bound"]]
        of_group = [finding for finding in findings if finding["group"] == group]
        rows += [[_mark(each), each["name"], each["measured"], each["bound"]] for each in of_group]
        text += textwrap.indent(text_table(rows, left=range(4)), "  ")
        for finding in of_group:
            if finding["words"] and finding["verdict"] not in (Verdict.short.name, Verdict.failed.name):
                text += _item(finding["name"], finding)
    return text


def _mark(finding: dict[str, Any]) -> str:
    return MARKS[Verdict[finding["verdict"]]]


def _item(about: str, finding: dict[str, Any]) -> str:
    if finding["measured"] and finding["verdict"] == Verdict.failed.name:
        about += f" ({finding['measured']})"
    filled = textwrap.fill(f"{about}: {finding['words']}", WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return filled + "\n"
