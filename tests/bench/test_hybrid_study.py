"""benchmarks/studies/hybrid: what a line says of the ranks' answers, gains, bytes, simulations, and the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.hybrid.__main__ import LEARNED, STUDY, error, gain, measure, speed_up
from benchmarks.studies.hybrid.rank import config_of, random_model
from partitioner.cost.link import Link
from partitioner.cost.measured import MeasuredCost
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from runahead.config import PrefillOptions
from runahead.context import ContextPartition, even

TINY = {"layers": 4, "hidden": 64, "mlp": 96, "period": 4}


def cost_of(states: tuple[int, ...]) -> MeasuredCost:
    points = {64: 1e-3, 128: 2e-3}
    return MeasuredCost(
        num_places=4,
        states=states,
        first_s=points,
        between_s=points,
        own_s={64: 1e-3, 128: 4e-3},
        last_s=points,
        state_s={64: 5e-4, 128: 1e-3} if states else {},
        prefix_s={(c, P): 1e-7 * c * P for c in points for P in points},
    )


class FakeJob:
    """Two ranks: a hybrid takes 2 s alone and 1 s together, attention 3 s alone and 2 s together."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any]) -> Any:
        self.asked.append(request)
        if "probe" in request:
            states = (0, 1, 2) if request["probe"] == "hybrid" else ()
            link = Link.from_gbps(10.0).as_json()
            return {"cost": cost_of(states).to_json(), "link": link, "kv_bytes_per_token": 512, "state_bytes": 1000.0}
        seconds = {"hybrid": (2.0, 1.0), "attention": (3.0, 2.0)}[request["model"]]
        spans = [[["compute", 0, 0.0, 0.5, ""]], [["wait", 0, 0.0, 0.5, "K,V"], ["compute", 0, 0.5, 1.0, ""]]]
        return {
            "ttft_s": seconds[request["prefill"] == "kv_runahead"],
            "boundaries": [0, 70, 128],
            "sent_bytes": [7000, 0],
            "wait_s": [0.0, 0.25],
            "spans": spans if request["record"] else [],
        }


def measured(*given: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any]:
    sizes = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    options = STUDY.parser().parse_args(["--lengths", "128", "--rounds", "2", *sizes, *given])
    job: Any = FakeJob()
    [variant] = STUDY.variants(options)
    lines = [{"date": "today"} | line for line in measure(options, job, variant)]
    return lines, job.asked, options


def test_both_models_measure_in_turn_after_the_prompts_that_the_split_learns_from() -> None:
    lines, asked, _ = measured()
    prefills = [(each["model"], each["prefill"]) for each in asked if "prefill" in each]
    assert prefills[: 2 * LEARNED] == [("hybrid", "kv_runahead"), ("attention", "kv_runahead")] * LEARNED
    turns = prefills[2 * LEARNED : -2]
    assert len(turns) == 2 * 4 and turns[4:] == turns[3::-1]
    assert [line["model"] for line in lines] == ["hybrid", "attention"]
    hybrid, attention = lines
    assert (speed_up(hybrid), speed_up(attention)) == (2.0, 1.5)
    assert gain(hybrid, lines) == pytest.approx(2.0 / 1.5) and gain(attention, lines) is None
    assert (hybrid["state_bytes"], attention["state_bytes"]) == (3000, 0)
    assert hybrid["spans"] == attention["spans"] != []


def test_simulations_are_those_of_the_measured_split_and_of_more_ranks() -> None:
    lines, _, options = measured("--ranks", "4")
    for line, states in zip(lines, ((0, 1, 2), ()), strict=True):
        sizes: dict[str, Any] = {"kv_bytes_per_token": 512, "state_bytes": 1000.0}
        cost, link = cost_of(states), Link.from_gbps(10.0)
        two = Cluster.chain(cost, 2, link, prefill=PrefillOptions(), backend="gloo", **sizes)
        expected_s = simulate(ContextPartition(boundaries=(0, 70, 128)), two).ttft_s
        assert line["simulated_s"] == expected_s
        assert error(line) == pytest.approx(expected_s / line["chain_s"][0] - 1)
        [four] = line["simulated"]
        link = Link.from_gbps(options.gbps, latency_s=10e-6)
        wide = Cluster.chain(cost, 4, link, prefill=PrefillOptions(), backend="gloo", **sizes)
        assert four["ttft_s"] <= simulate(even(128, 4), wide).ttft_s
        assert (four["state_wait_s"] > 0) == bool(states)


def test_the_verdict_names_what_is_beyond_the_options(tmp_path: Path) -> None:
    lines, _, options = measured("--least-gain", "0.95", "--most-error", "0.15")
    for line in lines:
        line["simulated_s"] = 1.1 * line["chain_s"][0]
    assert STUDY.verdict(lines, options) is None
    lines[0]["single_s"] = [1.4, 1.4]
    lines[1]["simulated_s"] = 0.8 * lines[1]["chain_s"][0]
    said = STUDY.verdict(lines, options)
    assert said is not None and "the gain 0.933 at 128 tokens is below --least-gain 0.95" in said
    assert "attention at 128 tokens: the simulated TTFT is -20.0% off" in said
    table = STUDY.table(lines)
    assert "0.933" in table and "70" not in table.splitlines()[0]
    images = {name: picture(json.loads(json.dumps(lines))) for name, picture in STUDY.pictures.items()}
    assert set(images) == {"hybrid.png", "hybrid_skew.png", "hybrid_skew_attention.png"}
    assert all(image is not None and image.startswith(b"\x89PNG") for image in images.values())


def test_the_models_are_those_of_the_issue() -> None:
    sizes = {"layers": 48, "hidden": 576, "mlp": 1536, "period": 4}
    hybrid, attention = (config_of(kind, **sizes) for kind in ("hybrid", "attention"))
    assert hybrid.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert attention.layer_types == ["full_attention"] * 48
    assert len(hybrid.mlp_only_layers) == 48 and hybrid.intermediate_size == 1536
    model = random_model("hybrid", **TINY)
    assert [kind for kind, _ in model.order] == ["state"] * 3 + ["kv"]


@pytest.mark.parametrize("wrong", [("--hidden", "100"), ("--period", "9"), ("--rounds", "0")])
def test_a_wrong_option_is_told(wrong: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="must be a multiple of 64"):
        measured(*wrong)


@pytest.mark.slow
def test_two_ranks_measure_both_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    lines = tmp_path / "lines.jsonl"
    STUDY.main([*sizes, "--lengths", "96", "--rounds", "1", "--lines", str(lines), "--out", str(tmp_path)])
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["model"] for line in found] == ["hybrid", "attention"]
    assert found[0]["sent_bytes"] > found[0]["state_bytes"] > 0 == found[1]["state_bytes"]
    assert len(found[0]["spans"]) == 2 and (tmp_path / "hybrid_skew.png").is_file()
    assert "hybrid" in capsys.readouterr().out
