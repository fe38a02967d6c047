"""benchmarks/studies/sparse_prefill: what its lines say, in the table and the pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import lines
from benchmarks.studies.sparse_prefill import pictures
from benchmarks.studies.sparse_prefill.__main__ import STUDY, table
from benchmarks.studies.sparse_prefill.pictures import by_density, by_length, density, gain, loss, rule_of

ABOUT = {"date": "2026-11-28T10:42:02Z", "commit": "f182ba34", "model": "smollm2"}
PNG = b"\x89PNG"


def line(way: str, tokens: int, **more: Any) -> dict[str, Any]:
    """Two rounds of one way on two ranks."""
    given = {"options": {}, "ttft_s": [4.0, 6.0], "exact_s": [8.0, 9.0], "boundaries": [[0, 1024, 2048]] * 2}
    given |= {"wait_s": [[0, 0.1]] * 2, "density": [[None, None]] * 2, "nll": [], "exact_nll": [], "covered": []}
    return ABOUT | given | {"way": way, "tokens": tokens} | more


SPARSE = line(
    "xattention threshold 0.9",
    2048,
    options={"threshold": 0.9},
    density=[[0.8, 0.4], [0.4, 0.2]],
    nll=[0.5, 0.7],
    exact_nll=[0.4, 0.7],
    covered=[0.9, 0.92],
)


def test_density_is_of_all_pairs_and_loss_of_the_same_samples() -> None:
    """The first half sees a quarter of the pairs of blocks."""
    assert density(SPARSE) == pytest.approx(((0.8 + 3 * 0.4) / 4 + (0.4 + 3 * 0.2) / 4) / 2)
    assert loss(SPARSE) == pytest.approx(0.05) and gain(SPARSE) == pytest.approx((8 / 4 + 9 / 6) / 2)
    assert density(line("exact", 2048)) is None and loss(line("exact", 2048)) is None


def test_the_newest_lines_are_in_table_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "OTHERS", tmp_path / "others.jsonl")
    found = [line("exact", 2048, ttft_s=[99.0, 99.0]), line("exact", 2048), SPARSE]
    text = table(found)
    assert "99" not in text and "| 1.75 |" in text and "| 38% |" in text and "+0.050" in text and "f182ba34" in text
    assert by_density(found[:2]) is None and by_length([]) is None
    for draw in (by_length, by_density):
        image = draw(found)
        assert image is not None and image.startswith(PNG)
    times = {"measured": "time", "length": 2048, "share": 0.25}
    lines.append(
        pictures.OTHERS, [times | {"way": way, "ttft_s": [at]} for way, at in (("exact", 4.0), ("layers=5", 2.0))]
    )
    (made,) = pictures.speculative()
    assert made["way"] == "speculative, layers 5, 25%" and gain(made) == 2.0
    assert by_length([]) is not None


def test_exact_layers_have_a_curve_of_their_own() -> None:
    exact = line("xattention threshold 0.9, 2-3, 7 exact", 2048, options={"threshold": 0.9, "exact_layers": [7, 2, 3]})
    assert rule_of(SPARSE) == "2,048 tokens, threshold"
    assert rule_of(exact) == "2,048 tokens, threshold, 2-3, 7 exact"


def test_it_draws_from_lines_alone(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    lines.append(file, [line("exact", 2048), SPARSE])
    STUDY.main(["--draw-only", "--lines", str(file), "--out", str(tmp_path)])
    assert {each.name for each in tmp_path.glob("*.png")} == {"sparse_ttft.png", "sparse_loss.png"}
