"""--multirun: which jobs there are, where their files go, and what the table says. No job is really started."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from launch.evaluate import EVALUATE
from launch.infer import INFER
from launch.program import sweep
from partitioner.plan import PLAN
from partitioner.search import SEARCH


class Jobs:
    """Stands in for the processes of the jobs.

    Attributes:
        commands: what would have been run.
        failing: a job fails if one of these texts is among its arguments.
        ended_by: raised while the job with this number runs.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.failing: tuple[str, ...] = ()
        self.ended_by: dict[int, BaseException] = {}

    def wait_for(self, command, output, log) -> int:
        number = len(self.commands)
        self.commands.append(list(command))
        if number in self.ended_by:
            raise self.ended_by[number]
        if any(text in command for text in self.failing):
            log.write(b"loading 10%\rloading 20%\n[rank 1/2] no luck\n[rank 0/2] rank 1 failed\n")
            return 1
        output.write(f"output {number}\n".encode())
        for report in (arg.partition("=")[2] for arg in command if arg.startswith("report=")):
            Path(report).write_text(json.dumps(report_of(number)), encoding="utf-8")
        return 0

    def arguments(self, start: str) -> list[list[str]]:
        """Arguments of each job that begin like this."""
        return [[arg for arg in command if arg.startswith(start)] for command in self.commands]


def report_of(number: int) -> dict[str, object]:
    prompts = [
        {"batch": 0, "ttft_s": 1.0 + number, "tpot_s": None, "ranks": [{"kv_peak_bytes": 10}, {"kv_peak_bytes": 30}]},
        {"batch": 0, "ttft_s": 1.0 + number, "tpot_s": None, "ranks": [{"kv_peak_bytes": 10}, {"kv_peak_bytes": 30}]},
        {"batch": 1, "ttft_s": 2.0 + number, "tpot_s": 0.25, "ranks": [{"kv_peak_bytes": 20}]},
    ]
    return {"prompts": prompts, "model": "m"}


@pytest.fixture
def jobs(monkeypatch, tmp_path) -> Jobs:
    found = Jobs()
    monkeypatch.setattr(sweep, "_wait_for", found.wait_for)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    return found


def run(*args: str, program=INFER) -> int:
    return sweep.run_sweep(program, program.read(["--multirun", *args]))


def table(folder: str = "s") -> list[dict[str, str]]:
    with Path(folder, "table.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_combination_is_a_job_and_the_last_option_changes_fastest(jobs):
    assert run("sweep.dir=s", "policy=snapkv,h2o", "warmup=1", "policy.budget=0.2,0.5") == 0
    chosen = [(row["policy"], row["policy.budget"]) for row in table()]
    assert chosen == [("snapkv", "0.2"), ("snapkv", "0.5"), ("h2o", "0.2"), ("h2o", "0.5")]
    assert jobs.arguments("policy") == [[f"policy={policy}", f"policy.budget={budget}"] for policy, budget in chosen]
    assert jobs.arguments("warmup=") == [["warmup=1"]] * 4
    assert "warmup" not in table()[0]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("warmup=range(0,3)", ["0", "1", "2"]),
        ("warmup=choice(2,1)", ["2", "1"]),
        ("warmup=range(0,5,2)", ["0", "2", "4"]),
        ("policy=glob(key*)", ["keydiff", "keyformer"]),
        ("policy=glob([h*,q*])", ["h2o", "quest"]),
        ("generation.temperature=0.5,1", ["0.5", "1"]),
        ("prompt.file=a.txt,/b/c-1.txt", ["a.txt", "/b/c-1.txt"]),
        ("prompt.file='a,b.txt',c.txt", ["'a,b.txt'", "c.txt"]),
        ("+policy=h2o,full", ["h2o", "full"]),
    ],
)
@pytest.mark.sampled(3)
def test_values_are_listed_in_hydras_grammar(jobs, text, values):
    assert run("sweep.dir=s", text) == 0
    name = text.partition("=")[0].lstrip("+")
    assert [row[name] for row in table()] == values


@pytest.mark.parametrize(
    "text", ["partition.ratios=[0.6,0.4]", "prompt.file=a(1),[b]=c.txt", "prompt.text=a,b", "warmup=1"]
)
def test_one_value_is_one_job(jobs, text):
    assert run("sweep.dir=s", text, *["partition=ratios"] * text.startswith("partition")) == 0
    assert jobs.arguments(text) == [[text]]


def test_texts_add_up_and_of_other_options_the_last_one_counts(jobs):
    assert run("sweep.dir=s", "generation.stop=a,b", "generation.stop=c", "warmup=1,2", "warmup=3") == 0
    [command] = jobs.commands
    assert [arg for arg in command if "stop" in arg] == ["generation.stop=a,b", "generation.stop=c"]
    assert [arg for arg in command if "warmup" in arg] == ["warmup=3"]


def test_a_job_is_started_on_its_number_of_ranks(jobs):
    assert run("sweep.dir=s", "sweep.ranks=1,3") == 0
    alone, three = jobs.commands
    assert alone[1:3] == ["-m", "launch.infer"]
    assert three[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m"]
    assert not any("sweep." in arg for command in jobs.commands for arg in command)
    assert [row["sweep.ranks"] for row in table()] == ["1", "3"]


def test_on_several_nodes_of_slurm_srun_starts_the_ranks(jobs, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert run("sweep.dir=s", "sweep.ranks=1,8") == 0
    alone, eight = jobs.commands
    assert alone[1:3] == ["-m", "launch.infer"]
    assert eight[:2] == ["srun", "--ntasks=8"] and {"--nodes=2", "--cpus-per-task=3", "--overlap"} <= set(eight)
    assert eight[eight.index("-m") - 1 :][:3] == [alone[0], "-m", "launch.infer"]
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert run("sweep.dir=t", "sweep.ranks=2") == 0
    assert "torch.distributed.run" in jobs.commands[-1]


def test_each_job_has_a_folder(jobs, capsys):
    assert run("sweep.dir=x/s", "warmup=0,1", "timeline=t/trace.json", "answers=/dev/null") == 0
    for number in (0, 1):
        folder = Path("x/s", str(number)).resolve()
        assert {path.name for path in folder.iterdir()} == {
            "overrides.yaml",
            "output.txt",
            "log.txt",
            "report.json",
            "t",
        }
        assert f"- warmup={number}\n" in (folder / "overrides.yaml").read_text()
        assert jobs.commands[number][-2:] == [f"report={folder}/report.json", f"timeline={folder}/t/trace.json"]
    assert f"the table is in {Path('x/s/table.csv').resolve()}" in capsys.readouterr().err


def test_each_job_has_a_picture(jobs):
    args = ["sweep.dir=s", "picture=p.png", "device=h100", "tokens=4096,8192"]
    assert run(*args, program=PLAN) == 0
    assert jobs.arguments("picture=")[1][-1] == f"picture={Path('s/1/p.png').resolve()}"
    args[:2] = ["sweep.dir=t", "picture=/p.png"]
    assert run(*args, program=PLAN) == 2


def test_lines_of_all_jobs_may_go_to_one_file(jobs):
    assert run("sweep.dir=s", "lines=/l.jsonl", "model.seed=0,1", program=EVALUATE) == 0
    assert [args[0] for args in jobs.arguments("lines=")] == ["lines=/l.jsonl"] * 2


def test_the_folder_is_new_and_named_after_the_time_by_default(jobs):
    assert run("warmup=0,1") == 0
    [found] = Path("multirun").glob("????-??-??/??-??-??")
    assert len(table(str(found))) == 2


def test_flags_reach_the_jobs(jobs, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("defaults: [infer, _self_]\nwarmup: 4\n")
    assert run("--config-dir", "own", "-cn=mine", "--layout", "model.seed=0,1") == 0
    assert jobs.commands[1][3:8] == ["--config-dir", "own", "--config-name", "mine", "--layout"]


def test_the_table_has_the_figures_of_the_reports(jobs, capsys):
    assert run("sweep.dir=s", "warmup=0,1") == 0
    assert [(row["ttft_s"], row["tpot_s"], row["kv_peak_bytes"]) for row in table()] == [
        ("1.5", "0.25", "30"),
        ("2.5", "0.25", "30"),
    ]
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()[:2]] == [
        ["job", "warmup", "seconds", "ttft_s", "tpot_s", "kv_peak_bytes", "status"],
        ["0", "0", table()[0]["seconds"], "1.5", "0.25", "30", "done"],
    ]
    assert "job 1 of 2: warmup=1\njob 1: done (" in err


def test_a_failing_job_does_not_stop_the_others(jobs, capsys):
    jobs.failing = ("warmup=1",)
    assert run("sweep.dir=s", "warmup=0,1,2") == 1
    assert [row["status"] for row in table()] == ["done", "failed: [rank 1/2] no luck", "done"]
    assert "1 of 3 jobs failed" in capsys.readouterr().err


def test_a_combination_that_does_not_fit_is_not_started(jobs):
    assert run("sweep.dir=s", "prefill=zigzag,single", "policy=h2o,full") == 1
    assert [row["status"].partition(":")[0] for row in table()] == ["failed", "done", "done", "done"]
    assert "prefill=zigzag keeps all K,V" in table()[0]["status"] or "policy=h2o needs prefill" in table()[0]["status"]
    assert len(jobs.commands) == 3


def test_what_a_program_without_such_figures_prints_follows_the_table(jobs, capsys):
    assert run("sweep.dir=s", "search.lengths=[128],[256]", "table=t.json", "link.gbps=1", program=SEARCH) == 0
    assert (
        "\njob 0: search.lengths=[128]\noutput 0\n\njob 1: search.lengths=[256]\noutput 1\n" in capsys.readouterr().out
    )
    assert jobs.arguments("table=")[1][-1] == f"table={Path('s/1/t.json').resolve()}"
    assert jobs.arguments("report=") == [[], []]


def test_an_interruption_leaves_the_table_of_what_is_done(jobs):
    jobs.ended_by[1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run("sweep.dir=s", "warmup=0,1,2")
    assert [row["status"] for row in table()] == ["done", "interrupted", "not started"]


MISTAKES = [
    (["prompt.fil=x,y"], "unknown option prompt.fil; did you mean prompt.file?"),
    (["model=rando,foo"], "model=rando is not one of hf, random, smollm2"),
    (["sweep.rank=2"], "unknown option sweep.rank; a sweep has the options sweep.ranks and sweep.dir"),
    (["hydra.sweep.dir=x"], "unknown option hydra.sweep.dir; a sweep has the options sweep.ranks and sweep.dir"),
    (["sweep.ranks=0"], "sweep.ranks=0 is not a number of ranks; give 1 or more"),
    (["sweep.dir=old"], "sweep.dir=old is there already; name a new folder, or leave it out"),
    (["sweep.dir="], "sweep.dir= is empty; name a new folder, or leave it out"),
    (["warmup=interval(0,1)"], "warmup=interval(0,1) has no list of values"),
    (["warmup=range(0,100000)"], "--multirun has more than 10,000 jobs"),
    (["policy=glob(x*)"], "policy=glob(x*) has no value; check the pattern"),
    (["prompt.file=-"], "prompt.file=- can be read by one job only; give a file with --multirun"),
    (["warmup=a(b"], "cannot read warmup=a(b"),
    *(
        ([f"{option}=/r.json", "warmup=0,1"], f"{option}=/r.json would be written by every job; give a relative name")
        for option in ("report", "timeline", "answers", "ranks.fault_report")
    ),
    (["report=../r.json", "warmup=0,1"], "r.json would be written by every job; give a relative name"),
    (["--config-dir", "nowhere"], "--config-dir nowhere is not a folder"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_any_job(jobs, tmp_path, capsys, args, message):
    (tmp_path / "old" / "0").mkdir(parents=True)
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert jobs.commands == []
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_under_torchrun_the_message_says_how_to_start_it(jobs, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run("warmup=0,1") == 2
    assert capsys.readouterr().err == (
        "--multirun starts the ranks of each job by itself; run it without torchrun or srun: "
        "python -m launch.infer --multirun sweep.ranks=4 ...\n"
    )
