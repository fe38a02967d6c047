"""Studies of prefixes from other tiers, on a tiny model: lines, and tables with a time or a loss for each variant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.studies.prefixes import prefixes_in_few_bits
from benchmarks.studies.prefixes.prefix_loading import STUDY, VARIANTS
from runahead import Model
from tests.families import prompt, throughout
from tests.ranks.tasks import tiny_model


def test_every_variant_finds_the_prefix_where_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    assert model.fingerprint  # others use the model, too, and `throughout` changes what it computes
    monkeypatch.setattr(Model, "load", lambda *_: model)
    lines = tmp_path / "prefix_loading.jsonl"
    with throughout(model.dtype):
        args = ["--lengths", "40", "--new", "5", "--rounds", "2", "--lines", str(lines), "--out", str(tmp_path)]
        STUDY.main(args)
    [line] = [json.loads(text) for text in lines.read_text().splitlines()]
    assert {name: len(times) for name, times in line["ttft_s"].items()} == dict.fromkeys(VARIANTS, 2)
    assert 0 < line["few_bits_bytes"] < line["prefix_bytes"] / 3
    assert line["prefix_bytes"] == 40 * sum(shape.bytes_per_token() for shape in model.kv_shapes)
    assert "40" in capsys.readouterr().out


def test_losses_after_a_prefix_in_few_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer bits are fewer bytes and another loss, of the same samples. Wrong: the store without `bits`."""
    model = tiny_model("llama")
    monkeypatch.setattr(Model, "load", lambda *_: model)
    monkeypatch.setattr(prefixes_in_few_bits, "text_ids", lambda *_: prompt(90))
    for name, size in (("CONTEXT", 48), ("FOLLOWING", 8), ("PASSAGE", 8)):
        monkeypatch.setattr(prefixes_in_few_bits, name, size)
    lines = tmp_path / "few.jsonl"
    with throughout(model.dtype):
        prefixes_in_few_bits.STUDY.main(["--samples", "2", "--lines", str(lines), "--out", str(tmp_path)])
    found = [json.loads(text) for text in lines.read_text().splitlines()]
    assert [line["bits"] for line in found] == [None, 4, 2] * 2
    for exact, four, two in (found[:3], found[3:]):
        assert exact["token_bytes"] > four["token_bytes"] > two["token_bytes"]
        off = [max(abs(a - b) for a, b in zip(exact["losses"], each["losses"], strict=True)) for each in (four, two)]
        assert min(off) > 0 and max(off) < 1
    assert "| 2 bits " in capsys.readouterr().out
