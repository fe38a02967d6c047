"""The batch scripts of launch/slurm on two nodes: right answers, and what is left when a job does not go its way."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import socket
from pathlib import Path

import httpx2
import pytest

from launch.infer import main
from tests.families import save_tiny_config
from tests.slurm.cluster import Cluster, Job, text_of, wait_until
from tests.tokenizers_for_tests import byte_level

pytestmark = pytest.mark.slurm

SCRIPTS = Path(__file__).resolve().parents[2] / "launch" / "slurm"
SMALL = ("--cpus-per-task=1", "--mem=100")  # the nodes are made up, and jobs run beside each other
LONG = "generation.max_new_tokens=100000"  # takes minutes, so a job is in the middle of it after a few seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a tiny random model with a tokenizer."""
    folder = save_tiny_config(tmp_path_factory.mktemp("model"), byte_level(), max_position_embeddings=200_000)
    return ["model=random", f"model.config={folder}", "ranks.device=cpu", "ranks.threads=1"]


def written(folder: Path) -> set[str]:
    """Files below a folder, but for the reports of ranks that had to end."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return {name for name in names if not name.endswith(".fault.json")}


def runs_torchrun(process: int) -> bool:
    return b"torch.distributed.run" in Path(f"/proc/{process}/cmdline").read_bytes()


def has_pending(process: int, number: signal.Signals) -> bool:
    """Whether a process that is halted has been sent a signal, which it gets when it goes on."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return bool(int(fields["ShdPnd"], 16) >> (number - 1) & 1)


def lengths_in(table: Path) -> list[int]:
    """Lengths that a search has put into its table so far."""
    return [entry["length"] for entry in json.loads(table.read_text())["entries"]] if table.exists() else []


def submit_long(cluster: Cluster, model: list[str], folder: Path) -> Job:
    """Returns once the answer of a long run streams."""
    options = (*model, "prompt.random_tokens=64", "generation.ignore_eos=true", LONG, "report=run.json")
    job = cluster.submit(*SMALL, SCRIPTS / "infer.sbatch", *options, folder=folder)
    part = folder / f"runahead-infer-{job.number}" / "answers.part"
    wait_until(lambda: job.ended or (part.exists() and part.stat().st_size > 0), "the answer")
    assert not job.ended, job.log
    return job


def near_the_limit(cluster: Cluster, job: Job, node: str) -> None:
    """Signal a job that its time limit is near. Until it has heard, the rank of a node does nothing."""
    # However long the signal takes on a busy machine, the work gets no further.
    [halted] = cluster.processes(SLURM_JOB_ID=str(job.number), SLURMD_NODENAME=node, LOCAL_RANK="0")
    os.kill(halted, signal.SIGSTOP)
    # What --signal=B:USR1@... makes SLURM do.
    cluster.ask("scancel", "--batch", "--signal=USR1", str(job.number))
    wait_until(lambda: has_pending(halted, signal.SIGTERM), "the end of the ranks")
    os.kill(halted, signal.SIGCONT)


@pytest.mark.slow
def test_two_nodes_answer_as_one_process(
    cluster: Cluster, model: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "story.txt").write_text("the letters of the captain to his sister, from the ice. " * 4)
    options = [*model, "prompt.question=why, [then]?", "generation.max_new_tokens=12"]
    job = cluster.submit(
        *SMALL, SCRIPTS / "infer.sbatch", *options, "prompt.file=story.txt", "report=run.json", folder=tmp_path
    )
    main([*options, f"prompt.file={tmp_path / 'story.txt'}", f"report={tmp_path / 'one.json'}"])
    assert job.wait() == ("COMPLETED", 0), job.log
    name = f"runahead-infer-{job.number}"
    assert (tmp_path / name / "answers").read_text() == capfd.readouterr().out
    assert written(tmp_path / name) == {"answers", "start-0/rank-0.err", "start-0/rank-1.err"}
    assert f"runahead: the answers are in {name}/answers" in job.log
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "run"))
    assert two["new_token_ids"] == one["new_token_ids"]
    assert two["world_size"] == 2
    assert two["partition"]["boundaries"][1] < one["prompt_tokens"]


def test_every_gpu_gets_a_rank_and_the_program_its_arguments(
    cluster: Cluster, model: list[str], tmp_path: Path
) -> None:
    more = ("prompt.text=one  two", "partition=ratios", "partition.ratios=[0.4,0.3,0.2,0.1]", "--cfg", "job")
    one_task_has_one = ("--gpus-per-node=2", "--ntasks-per-node=2", "--gpus-per-task=1")
    job = cluster.submit(*SMALL, *one_task_has_one, SCRIPTS / "infer.sbatch", *model, *more, folder=tmp_path)
    assert job.wait() == ("COMPLETED", 0), job.log
    folder = tmp_path / f"runahead-infer-{job.number}"
    options = (folder / "answers").read_text()
    assert "text: one  two\n" in options
    assert "ratios:\n  - 0.4\n  - 0.3\n  - 0.2\n  - 0.1\n" in options
    assert written(folder) == {"answers", *(f"start-0/rank-{rank}.err" for rank in range(4))}


def test_tasks_of_srun_are_ranks_without_torchrun(cluster: Cluster, model: list[str], tmp_path: Path) -> None:
    command = (cluster.environment["PYTHON"], "-m", "launch.infer", *model, "prompt.random_tokens=64", "partition=even")
    tasks = ("--nodes=2", "--ntasks=2", "--gpus-per-task=1", "--mem=100")
    done = cluster.run("srun", *tasks, *command, "report=run.json", folder=tmp_path, MASTER_ADDR="127.0.0.1")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["world_size"] == 2
    assert [rank["chunk_tokens"] for rank in report["ranks"]] == [32, 32]


def test_a_wrong_option_is_told_in_the_log(cluster: Cluster, model: list[str], tmp_path: Path) -> None:
    job = cluster.submit(*SMALL, "--nodes=1", SCRIPTS / "infer.sbatch", *model, "prompt.txt=a", folder=tmp_path)
    state, status = job.wait()
    assert (state, status) == ("FAILED", 1)
    name = f"runahead-infer-{job.number}"
    assert job.log.splitlines()[-2:] == [
        f"runahead: ended with status {status}; the log of each rank is in {name}/start-0",
        "unknown option prompt.txt; did you mean prompt.text?",
    ]
    assert written(tmp_path / name) == {"start-0/rank-0.err"}


@pytest.mark.slow
def test_a_killed_node_ends_the_job_with_the_line_of_the_other(
    cluster: Cluster, model: list[str], tmp_path: Path
) -> None:
    job = submit_long(cluster, model, tmp_path)
    [launcher] = filter(runs_torchrun, job.processes("n2"))
    os.kill(launcher, signal.SIGKILL)  # which its rank must not outlive
    state, status = job.wait()
    assert state == "FAILED"
    assert status != 0
    said = job.log.partition("runahead: ended with status")[2].splitlines()[1:]
    assert len(said) == 1 and said[0].startswith("[rank 0/2] "), job.log
    assert "rank 1" in said[0]
    assert job.processes() == []
    assert written(tmp_path) == {
        f"runahead-infer-{job.number}.log",
        *(f"runahead-infer-{job.number}/start-0/rank-{rank}.err" for rank in range(2)),
    }


@pytest.mark.slow
def test_scancel_leaves_nothing_behind(cluster: Cluster, model: list[str], tmp_path: Path) -> None:
    job = submit_long(cluster, model, tmp_path)
    assert len(job.processes("n2")) == 2  # torchrun and a rank
    cluster.ask("scancel", str(job.number))
    assert job.wait()[0] == "CANCELLED"
    assert job.processes() == []
    assert written(tmp_path) == {
        f"runahead-infer-{job.number}.log",
        *(f"runahead-infer-{job.number}/start-0/rank-{rank}.err" for rank in range(2)),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_goes_on_when_it_is_queued_again(cluster: Cluster, model: list[str], tmp_path: Path) -> None:
    options = ("table=mine.json", "search.lengths=[96,192]", "search.ranks=[2]", "search.repeats=100")
    options += ("search.probe_layers=1", "search.min_stride=8", "ranks.timeout_s=600")
    script = (SCRIPTS / "search.sbatch", *model, *options)
    job = cluster.submit(*SMALL, *script, folder=tmp_path)
    points = tmp_path / "mine.json.points.jsonl"
    wait_until(lambda: points.exists() or job.ended, "the first point")
    near_the_limit(cluster, job, "n2")
    wait_until(lambda: job.ended or job.field("Restarts") == "1", "the second start")
    assert not job.ended, job.log
    before = points.read_text().splitlines()
    assert lengths_in(tmp_path / "mine.json") in ([], [96])
    job.start_again()
    assert job.wait() == ("COMPLETED", 0), job.log
    assert "the job is queued again and continues from what is kept" in job.log
    after = points.read_text().splitlines()
    assert after[: len(before)] == before
    measured = [tuple(json.loads(line)["boundaries"]) for line in after]
    assert len(set(measured)) == len(measured) > len(before) > 0
    assert lengths_in(tmp_path / "mine.json") == [96, 192]
    logs = {f"start-{start}/rank-{rank}.err" for start in range(2) for rank in range(2)}
    assert written(tmp_path / f"runahead-search-{job.number}") == logs
    assert not [name for name in written(tmp_path) if name.endswith(".part")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_answers_to_several_prompts_go_on_when_the_job_is_queued_again(
    cluster: Cluster, model: list[str], tmp_path: Path
) -> None:
    texts = [f"letter {number} of the captain to his sister" for number in range(6)]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    options = [*model, "generation.max_new_tokens=400", "generation.ignore_eos=true", "ranks.timeout_s=600"]
    script = (SCRIPTS / "infer.sbatch", *options, "prompt.file=letters.jsonl")
    job = cluster.submit(*SMALL, *script, folder=tmp_path)
    name = f"runahead-infer-{job.number}"
    answers = tmp_path / name / "answers.jsonl"
    wait_until(lambda: job.ended or bool(text_of(str(answers))), "the first answer")
    near_the_limit(cluster, job, "n2")
    wait_until(lambda: job.ended or job.field("Restarts") == "1", "the second start")
    assert not job.ended, job.log
    before = answers.read_text()
    job.start_again()
    assert job.wait() == ("COMPLETED", 0), job.log
    assert "the job is queued again and continues from what is kept" in job.log
    assert f"runahead: the answers are in {name}/answers.jsonl" in job.log
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert 0 < before.count("\n") < 6 and answers.read_text().startswith(before[: before.rindex("\n") + 1])
    main([*options, f"prompt.file={tmp_path / 'letters.jsonl'}", f"answers={tmp_path / 'one.jsonl'}"])
    one = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert [line["new_token_ids"] for line in lines] == [line["new_token_ids"] for line in one]
    logs = {f"start-{start}/rank-{rank}.err" for start in range(2) for rank in range(2)}
    assert written(tmp_path / name) == {"answers.jsonl", *logs}


@pytest.mark.slow
def test_a_benchmark_has_its_rounds_once(cluster: Cluster, model: list[str], tmp_path: Path) -> None:
    few = ("bench.variants=[single]", "bench.lengths=[64]", "bench.pairs=2", "bench.warmup=0", "bench.probe_repeats=1")
    where = ("--nodes=1", "--exclusive=user")  # beside the job that waits
    script = (SCRIPTS / "bench.sbatch", *model, *few, "bench.results=mine.jsonl")
    job = cluster.submit(*SMALL, *where, *script, folder=tmp_path)
    assert job.wait() == ("COMPLETED", 0), job.log
    [line] = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert (line["variant"], len(line["runs"])) == ("single", 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_says_where_it_is_and_ends_after_its_last_answer(
    cluster: Cluster, model: list[str], tmp_path: Path
) -> None:
    where = ("--nodes=2", "--gpus-per-node=1")
    job = cluster.submit(*SMALL, *where, SCRIPTS / "serve.sbatch", *model, folder=tmp_path)
    wait_until(lambda: job.ended or "on http://" in job.log, "the server")
    assert not job.ended, job.log
    name = f"runahead-serve-{job.number}"
    assert f"runahead: requests need the key in {name}/key" in job.log
    [port] = re.findall(rf"serving .* on http://{re.escape(socket.gethostname())}:(\d+), ", job.log)
    key = tmp_path / name / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    url, asked = f"http://127.0.0.1:{port}/v1/completions", {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
    assert httpx2.post(url, json=asked, trust_env=False, timeout=60).status_code == 401
    headers = {"authorization": f"Bearer {key.read_text().strip()}"}
    with httpx2.Client(headers=headers, trust_env=False, timeout=60) as client:
        assert client.post(url, json=asked).json()["usage"]["completion_tokens"] == 8
        with client.stream("POST", url, json=asked | {"max_tokens": 500, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            cluster.ask("scancel", "--batch", "--signal=USR1", str(job.number))
            wait_until(lambda: "draining: 1 running, 0 waiting" in job.log, "the signal")
            assert "data: [DONE]" in list(lines)
    assert job.wait() == ("COMPLETED", 0), job.log
    assert job.log.splitlines()[-1] == (
        "runahead: the time limit came near, and the server has ended after its last answer"
    )
    assert job.processes() == []
    assert written(tmp_path / name) == {"key", *(f"start-0/rank-{rank}.err" for rank in range(2))}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_evaluation_goes_on_when_it_is_queued_again(cluster: Cluster, model: list[str], tmp_path: Path) -> None:
    few = (
        "policies=[full,window,h2o]",
        "budgets=[0.5]",
        "tasks=[copy,perplexity]",
        "copy.passage=16",
        "copy.filler=40",
    )
    few += ("copy.samples=2", "copy.timed=false", "perplexity.tokens=128", "perplexity.chunk=32")
    job = cluster.submit(*SMALL, SCRIPTS / "evaluate.sbatch", *model, *few, folder=tmp_path)
    folder = tmp_path / f"runahead-evaluate-{job.number}"
    wait_until(lambda: job.ended or bool(list(folder.glob("*.jsonl"))), "the first line")
    near_the_limit(cluster, job, job.field("NodeList"))
    wait_until(lambda: job.ended or job.field("Restarts") == "1", "the second start")
    assert not job.ended, job.log
    [lines] = folder.glob("*.jsonl")
    before = lines.read_text().splitlines()
    job.start_again()
    assert job.wait() == ("COMPLETED", 0), job.log
    assert "the job is queued again and continues from what is kept" in job.log
    after = lines.read_text().splitlines()
    assert after[: len(before)] == before and len(after) > len(before) > 0
    assert len(set(after)) == len(after)
    assert json.loads((folder / "report.json").read_text())
    assert {f"start-{start}/rank-0.err" for start in range(2)} <= written(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_runs_its_jobs_on_all_nodes_of_one_job(cluster: Cluster, model: list[str], tmp_path: Path) -> None:
    options = [*model, "prompt.random_tokens=64", "partition=even", "generation.max_new_tokens=3", "sweep.dir=sweep"]
    swept = [*options, "policy=full,streaming_llm", "sweep.ranks=1,2"]
    command = shlex.join([cluster.environment["PYTHON"], "-m", "launch.infer", "--multirun", *swept])
    where = ("--nodes=2", "--ntasks-per-node=1", "--output=sweep.log")
    job = cluster.submit(*SMALL, *where, f"--wrap={command}", folder=tmp_path, MASTER_ADDR="127.0.0.1")
    assert job.wait() == ("COMPLETED", 0), (tmp_path / "sweep.log").read_text()
    with (tmp_path / "sweep" / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done"] * 4
    reports = [json.loads((tmp_path / "sweep" / row["job"] / "report.json").read_text()) for row in rows]
    assert [report["world_size"] for report in reports] == [1, 2, 1, 2]
    assert [len(report["ranks"]) for report in reports] == [1, 2, 1, 2]
    assert reports[0]["new_token_ids"] == reports[1]["new_token_ids"]
    assert job.processes() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_doctor_examines_two_nodes(cluster: Cluster, model: list[str], tmp_path: Path) -> None:
    where = ("--nodes=2", "--gpus-per-node=1", "--exclusive=user")
    few = ("doctor.lengths=[64]", "doctor.rounds=1", "doctor.faults=false")
    job = cluster.submit(*SMALL, *where, SCRIPTS / "doctor.sbatch", *model, *few, folder=tmp_path)
    wait_until(lambda: job.ended, "two jobs of a busy machine", 300)
    assert job.wait() == ("COMPLETED", 0), job.log
    name = f"runahead-doctor-{job.number}"
    page = json.loads((tmp_path / name / "page" / "doctor.json").read_text())
    assert (page["ranks"], page["races"][0]["ranks"]) == (2, 2)
    groups = {finding["group"]: finding["verdict"] for finding in page["findings"]}
    assert groups["exactness"] == "good"
    assert (tmp_path / name / "page" / "doctor.txt").read_text() in job.log
    assert job.processes() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_first_day_runs_a_part_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    where = ("--nodes=2", "--gpus-per-node=1", "--exclusive=user")  # beside the job that waits
    parts = ("first_day.parts=[hosts_chain,copy_relay_last_2]", "ranks.device=cpu")
    job = cluster.submit(*SMALL, *where, SCRIPTS / "first_day.sbatch", *parts, folder=tmp_path)
    wait_until(lambda: job.ended, "a part of a busy machine", 300)
    assert job.wait() == ("COMPLETED", 0), job.log
    out = tmp_path / f"runahead-first-day-{job.number}" / "page"
    page = json.loads((out / "first_day.json").read_text())
    verdicts = {each["name"]: each["verdict"] for each in page["findings"] if each["group"] == "parts"}
    assert page["ranks"] == 2
    assert verdicts == {"hosts_chain": "skipped", "copy_relay_last_2": "good"}, "both nodes are this machine"
    assert (out / "copy_relay_last_2").is_dir() and (out / "first_day.txt").read_text() in job.log
    assert job.processes() == []


@pytest.mark.parametrize("signalled_by", ["scancel", pytest.param("its limit", marks=pytest.mark.slow)])
def test_near_the_time_limit_a_run_ends_without_answers(
    cluster: Cluster, model: list[str], tmp_path: Path, signalled_by: str
) -> None:
    """A run that waits for its prompt."""
    os.mkfifo(tmp_path / "prompt")
    # SLURM may signal half a minute before it should, and these are whole minutes.
    limit = ("--time=2", "--signal=B:USR1@5") if signalled_by == "its limit" else ()
    job = cluster.submit(*SMALL, *limit, SCRIPTS / "infer.sbatch", *model, "prompt.file=prompt", folder=tmp_path)
    if signalled_by == "scancel":
        of_rank = {"SLURM_JOB_ID": str(job.number), "LOCAL_RANK": "0"}
        wait_until(lambda: job.ended or len(cluster.processes(**of_rank)) == 2, "the ranks of both nodes")
        cluster.ask("scancel", "--batch", "--signal=USR1", str(job.number))
    assert job.wait()[0] == "FAILED"
    assert job.log.splitlines()[-1] == (
        "runahead: the time limit came near, so there are no answers; give the job more --time"
    )
    assert job.processes() == []
    name = f"runahead-infer-{job.number}"
    assert written(tmp_path) == {
        "prompt",
        f"{name}.log",
        *(f"{name}/start-0/rank-{rank}.err" for rank in range(2)),
    }
