"""The study of loading prefixes, on a tiny model: a line, and a table with a time for each variant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.studies.prefixes.prefix_loading import STUDY, VARIANTS
from runahead import Model
from tests.families import throughout
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
    assert line["prefix_bytes"] == 40 * sum(shape.bytes_per_token() for shape in model.kv_shapes)
    assert "40" in capsys.readouterr().out
