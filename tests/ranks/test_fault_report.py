"""The report that a rank leaves behind when it has to end can be read, and names no folder of one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runahead.ranks import fault_report
from runahead.ranks.fault_report import fault_path, write_fault_report
from runahead.ranks.ranks import Ranks
from runahead.ranks.transfer_records import TransferRecord


def one_rank(backend: str = "gloo") -> Ranks:
    ranks = Ranks(0, 1, device=torch.device("cpu"), backend=backend, timeout_s=7.0)
    for layer in range(2):
        record = TransferRecord(direction="send", peer=1, layer=layer, start=0, end=8, num_bytes=64)
        ranks.records.posted(record)
        if layer == 0:
            record.done()
    return ranks


@pytest.mark.parametrize(("report", "of_rank_2"), [("a/run.json", "run.rank2.fault.json"), ("x", "x.rank2.fault.json")])
def test_every_rank_has_a_file_of_its_own(report: str, of_rank_2: str) -> None:
    assert fault_path(report, 2) == Path(report).with_name(of_rank_2)


def test_what_is_over_and_what_is_outstanding_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "run.rank0.fault.json"
    write_fault_report(path, one_rank(), "rank 1 has been silent")
    told = json.loads(path.read_text())
    assert (told["reason"], told["rank"], told["world_size"], told["timeout_s"]) == (
        "rank 1 has been silent",
        0,
        1,
        7.0,
    )
    assert [(each["layer"], each["bytes"]) for each in told["done"]] == [(0, 64)]
    assert [(each["layer"], each["peer"], each["done_s_ago"]) for each in told["outstanding"]] == [(1, 1, None)]
    assert told["waiting_for"] is None
    assert any("_stacks" in call for call in told["threads"]["MainThread"])
    assert str(Path(__file__).parents[1]) not in path.read_text()


def test_where_nccl_carries_kv_its_recorder_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_report, "flight_recorder", lambda: b'{"entries": []}')
    path = tmp_path / "run.rank0.fault.json"
    write_fault_report(path, one_rank("nccl"), "stuck")
    assert json.loads(path.read_text())["nccl_flight_recorder"] == "run.rank0.fault.nccl.json"
    assert json.loads((tmp_path / "run.rank0.fault.nccl.json").read_text()) == {"entries": []}


def test_a_recorder_that_does_not_answer_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from torch._C import _distributed_c10d

    monkeypatch.setattr(fault_report, "DUMP_S", 0.05)
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", threading.Event().wait, raising=False)
    assert fault_report.flight_recorder() is None
    monkeypatch.setattr(fault_report, "DUMP_S", 60.0)
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda: b"{}")
    assert fault_report.flight_recorder() == b"{}"
