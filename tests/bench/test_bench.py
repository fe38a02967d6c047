"""launch/bench.py as a user runs it, on a tiny model: under torchrun, and on two hosts where that is allowed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import lines, machine
from benchmarks.network.shaped_network import check_machine
from benchmarks.ttft.bounds import measure_compute, read_compute
from benchmarks.ttft.measurement import Contenders, Measurement
from benchmarks.ttft.options import BenchOptions
from benchmarks.ttft.plot import main as plot
from launch.bench import main
from partitioner.table.fingerprint import Fingerprint
from policies.pyramidinfer import PyramidInfer
from runahead import PrefillOptions, Ranks, RanksOptions
from tests.exit_status import exit_status
from tests.families import save_tiny_config
from tests.needs import missing
from tests.ranks.tasks import tiny_model
from tests.waiting import until
from tests.warm_program import WarmProgram, run_warm

BENCH = Path(__file__).resolve().parents[2] / "launch" / "bench.py"
VARIANTS = ["single", "kv_runahead", "kvr_e", "kvr_s", "tsp_dense", "tsp_causal", "zigzag"]
VARIANTS += ["zigzag_direct", "compute_only", "single_pyramidinfer", "kvr_pyramidinfer", "tensor", "pipeline"]
VARIANTS += ["pipeline_even", "kvr_streaming", "plain_transformers"]
KV_BYTES_PER_TOKEN = 2 * 2 * 8 * 4 * 3
"""Keys and values x KV heads x head dim x float32 x layers."""
HIDDEN_BYTES = 32 * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_config(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


def options(model: Path, results: Path, *more: str) -> list[str]:
    return [
        "model=random",
        f"model.config={model}",
        "bench.lengths=[96,150]",
        "bench.pairs=2",
        "bench.probe_repeats=1",
        f"bench.results={results}",
        "ranks.threads=1",
        *more,
    ]


def command(*args: str, ranks: int = 2) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, str(BENCH), *args]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=240, env=environment, encoding="utf-8")


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The file of a benchmark, and what was printed."""
    results = tmp_path_factory.mktemp("results") / "bench.jsonl"
    split = ["partition=ratios", "partition.ratios=[0.75,0.25]"]
    done = run_warm(BENCH, options(model, results, f"bench.variants=[{','.join(VARIANTS)}]", *split))
    return results, done.stdout


def by_variant(path: Path, length: int) -> dict[str, dict[str, Any]]:
    return {line["variant"]: line for line in lines.read(path) if line["length"] == length}


def test_every_variant_and_length_has_a_line_with_all_its_runs(measured: tuple[Path, str]) -> None:
    for length in (96, 150):
        found = by_variant(measured[0], length)
        assert list(found) == VARIANTS
        assert all([run["round"] for run in line["runs"]] == [0, 1] for line in found.values())
        bound = found.pop("compute_only")  # computes with made-up K,V
        assert (bound["first_token"], bound["sent_bytes"]) == (None, 0)
        assert bound["boundaries"] == found["kvr_s"]["boundaries"]
        alone, chain = found.pop("single_pyramidinfer"), found.pop("kvr_pyramidinfer")
        assert alone["memory"]["kv_kept_bytes"] < found["single"]["memory"]["kv_kept_bytes"]
        prefix = chain["boundaries"][1]
        assert (chain["sent_bytes"] < prefix * KV_BYTES_PER_TOKEN) == (prefix > PyramidInfer().min_tokens)
        assert len({line["first_token"] for line in found.values()}) == 1
        assert all(line["bounds"]["free_s"] <= line["bounds"]["single_s"] for line in found.values())


def test_what_was_sent_is_what_the_formulas_say_to_the_byte(measured: tuple[Path, str]) -> None:
    for length in (96, 150):
        found = by_variant(measured[0], length)
        assert found.pop("tensor")["sent_bytes"] is None  # it sends other things
        sent = {name: line["sent_bytes"] / KV_BYTES_PER_TOKEN for name, line in found.items()}
        assert all(line["sent_bytes"] == line["formula_bytes"] for line in found.values()), sent
        assert sent["single"] == 0
        assert found["pipeline"]["sent_bytes"] == found["pipeline_even"]["sent_bytes"] == length * HIDDEN_BYTES
        assert sent["kv_runahead"] == round(0.75 * length)
        assert sent["tsp_causal"] == sent["tsp_dense"] == sent["zigzag"] == length == 2 * sent["kvr_e"]


def test_bounds_are_printed_before_the_tables(measured: tuple[Path, str]) -> None:
    printed = measured[1]
    assert printed.index("TTFT*(p)") < printed.index("96 tokens, loopback") < printed.index("150 tokens, loopback")
    table = printed[printed.index("150 tokens") :].splitlines()[2:]
    assert [row.split()[0] for row in table if row] == VARIANTS


def test_pictures_and_tables_come_from_the_lines(
    measured: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot(["--results", str(measured[0]), "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"bench_ttft.png", "bench_speedup.png", "bench_bytes.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    capsys.readouterr()
    assert plot(["--results", str(measured[0]), "--table"]) == 0
    printed = capsys.readouterr().out
    for name in VARIANTS:
        assert printed.count(f"| {name} |") == 2


@pytest.fixture
def same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that change while a test runs are not noticed."""
    monkeypatch.setattr(machine, "code", lambda: "the same code")  # however long a test takes


def test_no_rounds_state_the_bounds_and_keep_the_measured_compute(
    same_code: None, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results, compute = tmp_path / "bench.jsonl", tmp_path / "compute.json"
    assert main(options(model, results, "bench.pairs=0", f"bench.compute={compute}")) == 0
    out = capfd.readouterr().out
    assert [row.split()[0] for row in out.splitlines() if row][1:] == ["tokens", "96", "150"]
    measured = read_compute(str(compute))
    assert measured is not None and measured.kv_bytes_per_token == KV_BYTES_PER_TOKEN
    assert not results.exists()


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_the_compute_of_layers_with_states_is_kept_for_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba 2 has no keys and values, and so none of their bytes."""
    model, path = tiny_model(family), tmp_path / "compute.json"
    settings = BenchOptions(variants=["single"], lengths=[96], compute=str(path), probe_repeats=1)
    with Ranks.start(RanksOptions()) as ranks:
        device = ranks.device
        about = Fingerprint.of_model(model, device=device, backend=ranks.backend, prefill=PrefillOptions())
        first = measure_compute(model, ranks, about, settings)
        assert (first.kv_bytes_per_token == 0) == (family == "mamba2") and first.state_bytes > 0
        assert read_compute(str(path)) == first
        kept = json.loads(path.read_text())
        other = json.loads(kept["cost"])
        other["states"] = other["states"][1:]  # another model's; it has keys and values in the first place
        path.write_text(json.dumps(kept | {"cost": json.dumps(other)}))
        if family == "mamba2":
            with pytest.raises(ValueError, match="no bytes of K,V per token"):
                read_compute(str(path))
        else:
            assert measure_compute(model, ranks, about, settings).cost.states == first.cost.states
            assert measure_compute(model, ranks, about, settings) == read_compute(str(path))


def test_lines_of_the_repository_are_of_committed_code(
    same_code: None, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "commit", lambda: "abc-dirty")
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    results = tmp_path / "bench.jsonl"
    arguments = options(model, results, "bench.variants=[single]", "bench.lengths=[96]", "bench.pairs=1")
    assert exit_status(main, arguments) == 2
    [told] = capfd.readouterr().err.splitlines()
    assert "the checkout is abc-dirty" in told and told.endswith("or give bench.dirty=true or other bench.results")
    assert not results.exists()
    assert main([*arguments, "bench.dirty=true"]) == 0
    assert [line["commit"] for line in lines.read(results)] == ["abc-dirty"]


def test_resume_runs_only_what_is_missing(
    same_code: None, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "bench.jsonl"
    arguments = options(model, results, "bench.variants=[single,kvr_e]", f"bench.compute={tmp_path / 'compute.json'}")
    assert main([*arguments, "bench.lengths=[96]"]) == 0
    assert main([*arguments, "bench.resume=true"]) == 0
    assert [line["length"] for line in lines.read(results)] == [96, 96, 150, 150]
    capfd.readouterr()
    assert main([*arguments, "bench.resume=true"]) == 0
    out, err = capfd.readouterr()
    assert out == "" and "nothing to do" in err
    assert len(lines.read(results)) == 4
    # One more round of one length, for all variants: ratios are taken round by round.
    assert main([*arguments, "bench.resume=true", "bench.pairs=3", "bench.lengths=[96]"]) == 0
    assert [len(line["runs"]) for line in lines.read(results)] == [2, 2, 2, 2, 1, 1]


@pytest.mark.slow
def test_other_options_are_other_measurements(same_code: None, model: Path, tmp_path: Path) -> None:
    results = tmp_path / "bench.jsonl"
    arguments = [*options(model, results, "bench.variants=[single]", "bench.resume=true"), "bench.lengths=[96]"]
    for more in ([], ["model.seed=1"], ["model.dtype=bfloat16"], ["prefill.layers_in_flight=2"]):
        assert main([*arguments, "bench.pairs=1", *more]) == 0
    keys = [line["key"] for line in lines.read(results)]
    assert len(keys) == len(set(keys)) == 4


def test_an_interruption_keeps_the_rounds_before_it(model: Path, tmp_path: Path) -> None:
    results = tmp_path / "bench.jsonl"
    arguments = options(model, results, "bench.variants=[single]", "bench.lengths=[500]", "bench.pairs=100000")
    program = WarmProgram(BENCH, arguments, {}, tmp_path)
    try:
        until(lambda: program.status is not None or "round 3 of" in program.errors)
        assert program.status is None, program.errors
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(120) == 130
    finally:
        program.kill()  # otherwise it would go on after a failed test
    assert "go on with bench.resume=true" in program.errors
    [line] = lines.read(results)
    assert 2 <= len(line["runs"]) < 100000


def test_variants_that_disagree_fail_loudly_and_keep_nothing(
    same_code: None, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Contenders.run

    def lying(self: Contenders, name: str, ids: list[int]) -> Measurement:
        found = honest(self, name, ids)
        return found if name == "single" else replace(found, first_token=1000)

    monkeypatch.setattr(Contenders, "run", lying)
    results = tmp_path / "bench.jsonl"
    assert exit_status(main, options(model, results, "bench.variants=[single,kvr_e]")) == 1
    told = capfd.readouterr().err.splitlines()[-1]
    assert told.startswith("first tokens differ at 96 tokens (single: ") and "; kvr_e: 1000)" in told
    assert not results.exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["bench.results=/no/such/folder/x.jsonl"], "there is no folder /no/such/folder"),
        (["bench.lengths=[512]"], "bench.lengths goes up to 512 tokens, but the model has 512 positions"),
        (
            ["partition=ratios", "partition.ratios=[0.5,0.3,0.2]", "bench.variants=[kv_runahead]"],
            "partition.ratios has 3 shares for 1 rank; use --nproc-per-node 3",
        ),
        (["bench.compute=/dev/null"], "bench.compute=/dev/null cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_measures_nothing(
    same_code: None, model: Path, tmp_path: Path, more: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "bench.jsonl"
    assert exit_status(main, options(model, results, *more)) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert says in err
    assert not results.exists()


@pytest.mark.slow
def test_a_model_that_a_variant_cannot_run_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    save_tiny_config(tmp_path, hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    results = tmp_path / "bench.jsonl"
    done = run(command(*options(tmp_path, results, "bench.variants=[single,tensor]")))
    assert done.returncode != 0
    [told] = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert told.startswith("[rank 0/2] 6 heads and 3 KV heads cannot be shared out to 2 ranks")
    assert done.stdout == "" and not results.exists()


@pytest.mark.slow
def test_two_hosts_with_a_noisy_slow_link(model: Path, tmp_path: Path) -> None:
    try:
        check_machine()
    except ValueError as error:
        missing(str(error))
    results = tmp_path / "bench.jsonl"
    more = [
        "bench.network=netns",
        "link.gbps=1",
        "link.noise=on",
        "bench.variants=[single,kvr_e]",
        "bench.lengths=[96]",
    ]
    done = run([sys.executable, str(BENCH), *options(model, results, *more)])
    assert done.returncode == 0, done.stderr
    found = by_variant(results, 96)
    expected = {"kind": "netns", "gbps": 1.0, "compute_share": None, "noise": True}
    for line in found.values():
        assert {name: line["network"][name] for name in expected} == expected
        assert (line["ranks"], line["hosts"]) == (2, 2)
    # Headers, acknowledgements, control messages and four heartbeats per second and rank on top of the K,V.
    extra = found["kvr_e"]["wire_bytes"] - found["kvr_e"]["sent_bytes"]
    assert 0 < extra < 100_000 + 20_000 * max(run["ttft_s"] for run in found["kvr_e"]["runs"])


def test_two_hosts_are_not_made_under_torchrun(
    same_code: None, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert exit_status(main, options(model, tmp_path / "bench.jsonl", "bench.network=netns", "link.gbps=1")) == 2
    assert capfd.readouterr().err == "bench.network=netns starts its own ranks; run the program without torchrun\n"
