"""Studies of what is shared and found again, on tiny models: what is compared is the same, and bounds count bytes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.harness import lines
from benchmarks.studies import second_question, shared_decoding
from runahead import Engine, Model, Ranks
from runahead.config import Device, RanksOptions
from runahead.reuse.prefix_tree import PrefixTree
from tests.families import build, throughout
from tests.ranks.tasks import tiny_model
from tests.serving.fakes import serving
from tests.unit.tokenizers_for_tests import byte_level


def test_shared_and_own_rows_decode_alike_and_the_bound_is_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(Model, "load", lambda *_: model)
    monkeypatch.setattr(shared_decoding, "text_ids", lambda *_: list(range(3, 90)))
    given = ["--shared", "120", "--rows", "2", "5", "--tokens", "3", "--rounds", "2", "--out", str(tmp_path)]
    with throughout(model.dtype):
        shared_decoding.STUDY.main([*given, "--lines", str(tmp_path / "lines.jsonl")])
    found = lines.read(tmp_path / "lines.jsonl", kind="shared_tokens")
    assert [line["rows"] for line in found] == [2, 5]
    token_bytes = sum(shape.bytes_per_token() for shape in model.kv_shapes)
    for line in found:
        assert line["largest_difference"] < 1e-9
        assert [len(seconds) for seconds in line["step_s"].values()] == [2, 2]
        assert line["bytes"]["own"] - line["bytes"]["shared"] == (line["rows"] - 1) * 120 * token_bytes
        assert line["bytes"]["shared"] > 120 * token_bytes
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_second_question_finds_the_document_and_a_conversation_its_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = build("llama", dtype=torch.float32, vocab_size=len(byte_level()), max_position_embeddings=4096)
    model = Model(module, name="llama")
    engine = Engine(model, Ranks.start(RanksOptions(device=Device.cpu)), tree=PrefixTree(1 << 30))
    with serving(engine=engine) as served:
        given = ["--url", served.url, "--document", "60", "--documents", "2", "--question", "5", "--new_tokens", "3"]
        given += ["--vocabulary", "90", "--lines", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path)]
        second_question.STUDY.main(given)
    [line] = lines.read(tmp_path / "lines.jsonl", kind="second_ttft_s")
    assert line["second_cached"] == [60, 60] and len(line["first_ttft_s"]) == 2
    turns = line["conversation"]["turns"]
    assert len(turns) == 6 and turns[0]["cached"] == 0
    for before, after in pairwise(turns):  # the answer's text may have other tokens than the answer
        assert before["prompt"] <= after["cached"] < after["prompt"]
    assert "times" in capsys.readouterr().out


def test_what_a_conversation_computes_is_compared_with_its_text() -> None:
    turns = [{"prompt": 10, "cached": 0, "answer": 4}, {"prompt": 20, "cached": 13, "answer": 5}]
    assert second_question.computed_and_text({"turns": turns}) == (24, 24)
    turns[1]["cached"] = 10  # the answer was not found
    assert second_question.computed_and_text({"turns": turns}) == (27, 24)
