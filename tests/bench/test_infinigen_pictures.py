"""Pictures and tables of InfiniGen's relations come from lines alone, and a text's samples are put together."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness.lines import Line
from benchmarks.studies.infinigen_relations.__main__ import (
    SIMILARITY,
    columns_png,
    groups,
    mass,
    ratios,
    similarity_png,
    subject,
    tables,
)
from benchmarks.studies.infinigen_relations.mass import ALL_COLUMNS, OURS, REFERENCES, VARIANTS

RATIOS = ("0.1", "0.2", "0.3")


def made_line(start: int, **other: Any) -> Line:
    """Masses grow with the ratio, with the variant's number and with where the sample begins."""
    masses: dict[str, Any] = {name: 0.9 + start / 1e5 for name in REFERENCES}
    for number, variant in enumerate(VARIANTS):
        masses[variant.name] = {ratio: 0.5 + float(ratio) + number / 100 + start / 1e5 for ratio in RATIOS}
    about = {"kind": "columns", "text": "made.txt", "prompt": 100, "share": 0.05, "model": "made", "start": start}
    return about | {"mass": masses, "similarity": {what: [0.1, 0.2, 0.8, 0.9] for what in SIMILARITY}} | other


def made_distance() -> Line:
    line = made_line(0, kind="distance")
    at = {ALL_COLUMNS: 0.9, "none": line["mass"]["none"], f"{OURS.name}, made anew": line["mass"][OURS.name]}
    return line | {"mass": {"0": at, "256": at}}


def test_names_of_variants_are_told_apart() -> None:
    names = [variant.name for variant in VARIANTS]
    assert len({*names, *REFERENCES}) == len(VARIANTS) + len(REFERENCES)


def test_samples_of_a_text_and_a_length_are_put_together() -> None:
    lines = [made_line(0), made_line(1000), made_line(0, prompt=200), made_line(0, text="other.txt"), made_distance()]
    found = groups(lines, "columns")
    assert [len(group) for group in found] == [2, 1, 1]
    assert subject(found[0]) == "made.txt, 2 samples, prompt 100 tokens"
    assert mass(found[0], ALL_COLUMNS) == pytest.approx(0.905)
    assert mass(found[0], VARIANTS[1].name, 0.2) == pytest.approx(0.715)
    assert ratios(found[0]) == [0.1, 0.2, 0.3]


def test_pictures_and_tables_are_made_of_lines() -> None:
    lines = [made_line(0), made_line(1000), made_line(0, prompt=200), made_distance()]
    for picture in (columns_png, similarity_png):
        assert (picture(lines) or b"").startswith(b"\x89PNG") and picture([made_distance()]) is None
    rows = tables(lines).splitlines()
    assert f"| {VARIANTS[1].name} | 0.615 | 0.715 | 0.815 |" in rows
    assert "| 256 to 512 | 0.900 | 0.700 / 0.800 | 0.780 / 0.880 |" in rows
    assert any(row.startswith("cosines from layer 3 on: block input 0.85") for row in rows)
