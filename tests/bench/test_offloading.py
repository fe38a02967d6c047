"""The benchmark of K,V in host memory, tiny and on a CPU: every variant decodes, and bounds count what is moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness import lines
from benchmarks.harness.lines import Line
from benchmarks.studies import offloading
from benchmarks.studies.offloading import FULL, POLICIES, TRANSFORMERS, Bytes

CONTEXT = 256


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Line], str]:
    folder = tmp_path_factory.mktemp("offloading")
    given = ["--shape", "tiny", "--dtype", "fp32", "--contexts", str(CONTEXT), "--batch", "2", "--device", "cpu"]
    given += ["--rounds", "2", "--tokens", "2", "--fetch", "0.125", "--trace", str(folder / "trace.json")]
    given += ["--lines", str(folder / "lines.jsonl"), "--out", str(folder)]
    offloading.STUDY.main(given)
    return folder, lines.read(folder / "lines.jsonl"), (folder / "trace.json").read_text()


def test_there_is_a_line_for_every_variant_that_runs_here(measured: tuple[Path, list[Line], str]) -> None:
    folder, found, _ = measured
    assert [line["variant"] for line in found] == [FULL, *POLICIES]
    for line in found:
        assert len(line["tpot_s"]) == 2 and min(line["tpot_s"]) > 0 and line["bound_s"] > 0
    assert (folder / "offloading.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_are_those_of_what_is_read(measured: tuple[Path, list[Line], str]) -> None:
    _, found, _ = measured
    by_name = {line["variant"]: line for line in found}
    per_token = 4 * 2 * 64 * 2 * 4  # layers, rows, heads x dim, keys and values, bytes
    stored, weights = CONTEXT + 6, 32000 * 64 + 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert by_name[FULL]["device_bytes"] == 4 * weights + (CONTEXT + 6) * per_token
    assert by_name["offload"]["device_bytes"] == by_name[FULL]["device_bytes"]
    assert by_name["offload"]["fetched_share"] == 1.0
    assert by_name["offload"]["kv_host_bytes"] >= stored * per_token > by_name["offload"]["kv_device_bytes"]
    assert by_name["infinigen, fixed"]["fetched_share"] == pytest.approx(0.125, abs=0.01)
    whole = by_name["infinigen, fixed, 3 layers whole"]
    assert whole["fetched_share"] == pytest.approx((3 + 0.125) / 4, abs=0.01)
    assert whole["kv_host_bytes"] * 4 == by_name["infinigen, fixed"]["kv_host_bytes"]
    assert by_name["infinigen"]["fetched_share"] <= 0.125
    assert by_name["infinigen, fixed"]["device_bytes"] < by_name["offload"]["device_bytes"]


def test_the_trace_is_one(measured: tuple[Path, list[Line], str]) -> None:
    assert any("index_select" in event.get("name", "") for event in json.loads(measured[2])["traceEvents"])


def test_the_bound_is_the_longer_of_memory_and_link() -> None:
    rates: dict[str, float | None] = {"memory_gbs": 100.0, "link_gbs": 10.0}
    assert Bytes(device=200 * 10**9, link=10 * 10**9).seconds(rates) == 2.0
    assert Bytes(device=100 * 10**9, link=30 * 10**9).seconds(rates) == 3.0
    assert Bytes(device=100 * 10**9, link=30 * 10**9).seconds(rates | {"link_gbs": None}) == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--layers", "9"], "--layers 9 must be 1 to 4 for tiny"),
        (["--contexts", "5"], "--contexts at least 256"),
        (["--draw-only"], "no lines yet"),
    ],
)
def test_wrong_options_end_in_one_line(given: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message) as ended:
        common = ["--shape", "tiny", "--device", "cpu", "--out", str(tmp_path)]
        offloading.STUDY.main([*common, "--lines", str(tmp_path / "none.jsonl"), *given])
    assert "\n" not in str(ended.value) and not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a GPU")
def test_transformers_cache_is_left_out_with_a_sentence(
    measured: tuple[Path, list[Line], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--shape", "tiny", "--layers", "1", "--dtype", "fp32", "--contexts", "256", "--variants", TRANSFORMERS]
    given += ["--device", "cpu", "--lines", str(measured[0] / "lines.jsonl"), "--out", str(tmp_path)]
    offloading.STUDY.main(given)
    assert "transformers offloaded left out: it copies on CUDA streams" in capsys.readouterr().err
