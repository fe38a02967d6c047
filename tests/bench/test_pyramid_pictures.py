"""Pictures and tables of the pyramid come from lines alone, and from samples that every policy has."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.harness.lines import Line
from benchmarks.studies.pyramid_relations import (
    FULL,
    UNSEEN,
    Samples,
    configurations,
    recent_ratio_png,
    shape_png,
    tables,
)

STARTS = (0, 1000, 2000)


def made_lines() -> list[Line]:
    """Every policy on every sample; losses grow with the policy's number and the sample's start."""
    lines = []
    for start in STARTS:
        for number, (name, options) in enumerate(configurations().items()):
            about = {"text": "made", "passage": 8, "filler": 32, "behind": 8, "model": "made", "start": start}
            found: dict[str, Any] = {"policy": name, "options": options, "prompt_tokens": 40}
            found |= {"kv_bytes": 100 - number, "full_kv_bytes": 100, "kept_tokens": [40, 30, 40 - number]}
            found |= {"copy_nll": 1 + number + start / 1000, "text_nll": 2 + 0.1 * number * (1 + start / 1000)}
            lines.append(about | found)
    return lines


def test_errors_are_those_of_paired_differences() -> None:
    samples, names = Samples(made_lines()), list(configurations())
    constant = samples.copy_nll(names[3], against=names[2])  # 1 more on every sample
    assert constant.mean == pytest.approx(1 + 3 + 1) and constant.error == pytest.approx(0)
    growing = samples.perplexity(names[3], against=names[2])  # 0.1, 0.2, 0.3 more
    assert growing.mean == pytest.approx(math.exp(2.6))
    assert growing.error == pytest.approx(math.exp(2.6) * 0.1 / math.sqrt(3))


def test_samples_that_a_policy_lacks_are_left_out() -> None:
    lines = [line for line in made_lines() if (line["policy"], line["start"]) != (UNSEEN, 1000)]
    assert Samples(lines).starts == [0, 2000]


def test_lines_of_another_text_are_left_out() -> None:
    others = [line | {"text": "other", "copy_nll": 100.0} for line in made_lines()]
    assert Samples([*others, *made_lines()]).copy_nll(FULL).mean == pytest.approx(2)


def test_pictures_and_tables_are_made_of_lines() -> None:
    for picture in (shape_png, recent_ratio_png):
        assert picture(made_lines()).startswith(b"\x89PNG")
    rows = tables(made_lines()).splitlines()
    assert len([row for row in rows if row.startswith("| ")]) == 1 + len(configurations())
    assert f"| {FULL} | 100.0% | 7.39 | 2.00 |" in rows
