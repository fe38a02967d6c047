"""launch/infer.py as a user runs it: one rank in this process, several under torchrun."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from launch.infer import main
from runahead.decoding.sampling import NOT_NUMBERS
from runahead.engine import Engine
from runahead.model.loading import hf
from tests import families
from tests.exit_status import exit_status, one_line_error
from tests.families import PRODUCTS, save_tiny_llama
from tests.partitioner.test_alone import let_times_decide
from tests.tokenizers_for_tests import byte_level
from tests.warm_program import WarmProgram, run_warm

INFER = Path(__file__).resolve().parents[2] / "launch" / "infer.py"
TEXT = "the letters of the captain to his sister, from the ice. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny random model with a tokenizer; its text is gibberish of valid and broken characters."""
    return save_tiny_llama(tmp_path_factory.mktemp("model"), byte_level())


def options(model: str, *more: str) -> list[str]:
    return ["model=hf", f"model.path={model}", "generation.max_new_tokens=12", "ranks.threads=1", *more]


def torchrun(*args: str, ranks: int = 2, **how) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(INFER)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not any(arg.startswith("partition") for arg in args):
        args = (*args, "partition.alone=false")  # short prompts, of a chain
    return subprocess.run(
        [*command, *args], capture_output=True, text=True, timeout=120, env=environment, encoding="utf-8", **how
    )


def our_lines(stderr: str) -> list[str]:
    """Without torchrun's epilogue."""
    return [line for line in stderr.splitlines() if line.startswith("[rank ")]


def test_one_rank_reads_the_tokenizer_once(model, monkeypatch, capfd):
    calls, read = [], hf.read_tokenizer
    monkeypatch.setattr(hf, "read_tokenizer", lambda *given: calls.append(given) or read(*given))
    main(options(model, f"prompt.text={TEXT}"))
    assert len(calls) == 1 and capfd.readouterr().out


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_standard_output_is_the_answer_and_the_report_tells_the_rest(model, tmp_path, capfd, monkeypatch, has_bfloat16):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_bfloat16})
    path = tmp_path / "run.json"
    assert main(options(model, f"prompt.text={TEXT}", f"report={path}", f"timeline={tmp_path / 'trace.json'}")) == 0
    out, err = capfd.readouterr()
    report = json.loads(path.read_text(encoding="utf-8"))
    assert out == report["text"] + "\n"
    assert len(report["new_token_ids"]) == 12
    assert (report["world_size"], report["device"], report["dtype"]) == (1, "cpu", "float32")
    assert report["partition"]["boundaries"] == [0, report["prompt_tokens"]]
    assert [line.split("  ")[0] for line in err.splitlines()] == [
        "prompt tokens",
        "new tokens",
        "ranks",
        *(["dtype"] if has_bfloat16 else []),
        "chunks",
        "TTFT",
        "TPOT",
        "KV moved",
        "KV peak per rank",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "trace.json", "trace.png"}


def test_a_stop_string_ends_the_answer_before_it(model, tmp_path, capfd):
    main(options(model, f"prompt.text={TEXT}"))
    whole = capfd.readouterr().out.removesuffix("\n")
    stop = whole[5:7]
    path = tmp_path / "run.json"
    main(options(model, f"prompt.text={TEXT}", f"generation.stop={json.dumps([stop])}", f"report={path}"))
    assert capfd.readouterr().out == whole[: whole.index(stop)] + "\n"
    assert json.loads(path.read_text(encoding="utf-8"))["finish_reason"] == "stop"


def test_warmup_makes_the_measured_run_warm(model, tmp_path, capfd):
    path = tmp_path / "run.json"
    main(options(model, f"prompt.text={TEXT}", "warmup=1", f"report={path}"))
    assert json.loads(path.read_text(encoding="utf-8"))["warm"] is True
    assert "(warm)" in capfd.readouterr().err


def test_several_prompts_give_a_line_each_in_order_however_they_are_batched(model, tmp_path, capfd):
    texts = ["the ice", TEXT, "captain", "his sister, from"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(text) for text in texts))
    one_by_one = []
    for text in texts:
        main(options(model, f"prompt.text={text}"))
        one_by_one.append(capfd.readouterr().out.removesuffix("\n"))
    for batch in (1, 3):
        main(options(model, f"prompt.file={path}", f"prompt.batch={batch}"))
        lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert [line["index"] for line in lines] == [0, 1, 2, 3]
        assert [line["text"] for line in lines] == one_by_one


def test_ids_without_a_tokenizer_give_ids(model, tmp_path, capfd):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (Path(model) / name).exists()
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (bare / name).symlink_to(Path(model) / name)
    (tmp_path / "ids.json").write_text("[5, 6, 7]")
    report = tmp_path / "run.json"
    assert main(options(str(bare), f"prompt.ids_file={tmp_path / 'ids.json'}", f"report={report}")) == 0
    assert capfd.readouterr().out == "\n"
    fields = json.loads(report.read_text())
    assert (fields["text"], len(fields["new_token_ids"])) == ("", 12)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["prompt.text=a", "generation.max_new_tokens=600"], "512 positions"),
        (["prompt.file=missing.txt"], "prompt.file=missing.txt does not exist"),
        (["prompt.text="], "prompt.text is empty"),
        (["prompt.text=a", "report=missing/run.json"], "there is no folder"),
        (["prompt.text=a", "timeline=trace.png"], "use .json"),
        (["prompt.text=a", "timeline=trace.json", "profile=nsys"], "profile=nsys is not one of none, nvtx, torch"),
        (["prompt.text=a", "profile=torch"], "add timeline=<json>"),
        (["prompt.text=a", "report=same.json", "timeline=same.json"], "overwrite each other"),
        (["prompt.text=a", "report=same.png", "timeline=same.json"], "overwrite each other"),
        (
            ["prompt.ids_file=run.json"],
            "report=run.json would overwrite prompt.ids_file=run.json, which this run reads; give another file with",
        ),
        (["prompt.text=a", "partition=ratios", "partition.ratios=[0.5,0.5]"], "1 rank"),
        (["prompt.text=a", "partition=table", "partition.table=t.json"], "lookup table t.json cannot be read"),
        (["prompt.text=a", "model.path=missing"], "missing"),
    ],
)
def test_a_mistake_ends_in_one_line_and_writes_nothing(model, tmp_path, monkeypatch, capfd, more, message):
    monkeypatch.chdir(tmp_path)
    assert exit_status(main, options(model, "report=run.json", *more)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["policy=duo_attention"], "policy duo_attention needs to know which heads of the model retrieve; give"),
        (["policy=razor_attention"], "policy razor_attention needs to know which heads of the model retrieve; give"),
        (
            ["policy=sequence", "policy.steps=[window,{name:razor_attention,compensate:false}]"],
            "policy razor_attention needs to know",
        ),
        (
            ["policy=dms"],
            "policy dms evicts the tokens that a model marks, and this one (llama) marks none; use another",
        ),
        (["policy=kvzap"], "policy=kvzap needs policy.predictor=<file.safetensors>, made for the model; make it with"),
        (
            ["generation.speculate=policy", "draft.policy={name:razor_attention}"],
            "policy razor_attention needs to know which heads of the model retrieve; give draft.policy.heads=<",
        ),
        (
            ["generation.speculate=policy", "draft.policy={name:snapkv,budget:0}"],
            "draft.policy.budget=0 must be",
        ),
    ],
)
def test_what_a_policy_lacks_is_told_before_the_weights_are_read(model, monkeypatch, capfd, more, says):
    monkeypatch.setattr("runahead.model.shares.load_model", lambda *_: pytest.fail("the weights are read"))
    assert exit_status(main, options(model, "prompt.text=a", *more)) == 2
    assert one_line_error(capfd).startswith(says)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["prompt.txt=a"], 2, "unknown option prompt.txt; did you mean prompt.text?"),
        (["prompt.file=missing.txt"], 2, "prompt.file=missing.txt does not exist; check the path"),
        (["prompt.text=a", "policy=dms"], 2, "policy dms evicts the tokens that a model marks, and this one (llama)"),
    ],
)
def test_the_last_line_under_torchrun_is_ours(model, more, status, said):
    done = torchrun(*options(model, *more))
    assert done.returncode == 1  # torchrun's own
    *_, code, _, line, border = done.stderr.splitlines()
    assert code.strip().startswith(f"exitcode  : {status} ")
    assert line.startswith(f"  traceback : {said}")
    assert set(border) == {"="}


def test_a_model_that_gives_no_numbers_is_a_mistake(model, tmp_path, capfd):
    """Only a token of the prompt shows it: the check of a loaded model does not see that row of the embeddings."""
    folder, rare = shutil.copytree(model, tmp_path / "model"), 77
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][rare] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "ids.json").write_text(f"[5, {rare}, 7]")
    assert exit_status(main, options(folder, f"prompt.ids_file={tmp_path / 'ids.json'}")) == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"{NOT_NUMBERS}\n")


def test_an_unforeseen_error_is_one_line_with_its_type(model, monkeypatch, capfd):
    def fail(*args: object, **more: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(Engine, "generate", fail)
    assert exit_status(main, options(model, "prompt.text=a")) == 1
    assert capfd.readouterr().err == "RuntimeError: first line\n"
    monkeypatch.setenv("RUNAHEAD_TRACEBACK", "1")
    assert exit_status(main, options(model, "prompt.text=a")) == 1
    assert "Traceback (most recent call last)" in capfd.readouterr().err


def test_settings_without_effect_are_warned_of(model, capfd):
    main(options(model, "prompt.text=the ice", "generation.temperature=0.5"))
    assert capfd.readouterr().err.startswith("warning: generation.temperature has no effect")


def test_two_ranks_answer_as_one_does(model, tmp_path, capfd):
    """One of them tells of a stored tensor that is not used, in one line."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    reports = [tmp_path / "one.json", tmp_path / "two.json"]
    question = "prompt.question=why, [then]?"
    (tmp_path / "text.txt").write_text(TEXT)
    main(options(model, f"prompt.file={tmp_path / 'text.txt'}", question, f"report={reports[0]}"))
    expected = capfd.readouterr().out
    split = ["partition=ratios", "partition.ratios=[0.6,0.4]", f"timeline={tmp_path / 'trace.json'}", "profile=torch"]
    done = torchrun(
        *options(str(folder), "prompt.file=-", question, f"report={reports[1]}", *split), input=TEXT, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    [told] = [line for line in done.stderr.splitlines() if "stored tensors" in line]
    assert told.startswith(f"warning: model.path={folder}: stored tensors that are not used: 1 of ")
    assert done.stdout == expected
    one, two = (json.loads(path.read_text(encoding="utf-8")) for path in reports)
    assert two["new_token_ids"] == one["new_token_ids"]
    assert two["world_size"] == 2
    first, second = two["ranks"]
    assert first["chunk_tokens"] + second["chunk_tokens"] == one["prompt_tokens"]
    assert first["kv_sent_bytes"] == second["kv_received_bytes"] > 0
    assert two["text"] == one["text"] and not our_lines(done.stderr) and "USDT" not in done.stderr
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in traced} == {0, 1}
    for rank in (0, 1):
        names = {(event.get("cat"), event["name"]) for event in traced if event["pid"] == rank}
        assert names >= {("compute", "layer 1"), ("user_annotation", "layer 1")}
        assert {name for kind, name in names if kind == "cpu_op"} & PRODUCTS


def test_ranks_of_a_job_share_a_model(model, capfd):
    """By torch's layout of tensors and transformers' plans, which a job that shares nothing has not imported."""
    main(options(model, f"prompt.text={TEXT}"))
    expected = capfd.readouterr().out
    done = torchrun(*options(model, f"prompt.text={TEXT}", "ranks.tensor=2"))
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


@pytest.mark.slow
def test_overrides_of_the_config_reach_every_rank_and_the_positions_beyond_its_own(tmp_path):
    """The recipe of docs/models.md, on a model of 64 positions: tokens of transformers with the same config."""
    folder, ids_file, report = tmp_path / "model", tmp_path / "ids.json", tmp_path / "run.json"
    families.build("qwen3", dtype=torch.float32, max_position_embeddings=64).save_pretrained(folder)
    ids = families.prompt(150)
    ids_file.write_text(json.dumps(ids))
    yarn = "{rope_type:yarn,factor:4.0,original_max_position_embeddings:64}"
    more = f"model.overrides={{rope_parameters:{yarn},max_position_embeddings:256}}"
    given = [f"prompt.ids_file={ids_file}", f"report={report}", "generation.ignore_eos=true"]
    done = torchrun(*options(str(folder), more, *given))
    assert done.returncode == 0, done.stderr
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = config.rope_parameters | {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config.max_position_embeddings = 256
    module = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    expected = module.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 150:]
    assert json.loads(report.read_text())["new_token_ids"] == expected.tolist()
    assert exit_status(main, options(str(folder), *given)) == 2  # without them the prompt is too long


def test_the_split_is_learned_and_the_next_start_goes_on_from_it(model, tmp_path):
    cache = {"RUNAHEAD_CACHE": str(tmp_path / "cache")}
    texts = [TEXT, TEXT[:100], TEXT, "ice"]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(text) for text in texts))
    answers = []
    for start in range(2):
        path = tmp_path / f"{start}.json"
        decode = ("last", "sharded")[start]  # which answer alike
        files = f"prompt.file={tmp_path / 'texts.jsonl'}", f"report={path}"
        done = run_warm(INFER, options(model, *files, f"decode={decode}", "partition.alone=false"), environment=cache)
        assert ("\ndecoding " in done.stderr) == (decode == "sharded")
        [kept] = (tmp_path / "cache" / "splits").iterdir()
        told = [line for line in done.stderr.splitlines() if "partition=auto" in line]
        assert told == ([] if start else [f"partition=auto: timed a few layers for the first split; kept in {kept}"])
        prompts = json.loads(path.read_text(encoding="utf-8"))["prompts"]
        assert {prompt["partition"]["name"] for prompt in prompts} == {"auto"}
        for prompt in prompts:  # the last one has a single token
            several = all(rank["chunk_tokens"] for rank in prompt["ranks"])
            assert prompt["decode"] == (decode if several else "last")
        assert {decode} <= {prompt["decode"] for prompt in prompts}
        for each in prompts:
            computed = sum(rank["chunk_tokens"] for rank in each["ranks"])
            assert computed + each["cached_tokens"] == each["prompt_tokens"]
        assert json.loads(kept.read_text())["prompts"], "what the prompts told"
        answers.append(done.stdout)
    assert answers[0] == answers[1]


def test_without_options_of_the_split_one_rank_computes_a_prompt_where_the_kept_times_say_so(model, tmp_path):
    cache, report = tmp_path / "cache", tmp_path / "run.json"
    arguments = options(model, f"prompt.text={TEXT}", f"report={report}", "decode=last")
    texts, found = [], {}
    for is_alone in (None, True, False):  # the first start times layers
        if is_alone is not None:
            let_times_decide(cache, [found["prompt_tokens"]], is_alone=is_alone)
        texts.append(run_warm(INFER, arguments, environment={"RUNAHEAD_CACHE": str(cache)}).stdout)
        found = json.loads(report.read_text(encoding="utf-8"))
        first, last = (rank["chunk_tokens"] for rank in found["ranks"])
        assert first + last == found["prompt_tokens"] and last > 0
        assert is_alone is None or (first == 0) == is_alone
        assert found["partition"]["boundaries"] == [0, first, first + last]
    assert len(set(texts)) == 1


@pytest.mark.slow
def test_a_mistake_under_torchrun_is_told_by_one_rank(model, tmp_path):
    done = torchrun(*options(model, f"prompt.file={tmp_path}"))
    assert done.returncode != 0
    assert done.stdout == ""
    assert our_lines(done.stderr) == [f"[rank 0/2] prompt.file={tmp_path} is a folder; name a file in it"]


class WaitingForItsPrompt(WarmProgram):
    """launch/infer.py, which has come to where it reads its prompt from a pipe."""

    def __init__(self, model: str, folder: Path, *more: str) -> None:
        pipe = folder / "prompt"
        os.mkfifo(pipe)
        super().__init__(INFER, options(model, f"prompt.file={pipe}", *more), {}, folder)
        # A pipe with a name can be opened for writing once somebody reads it.
        self.prompt: int | None = None
        while self.prompt is None:
            assert self.status is None, self.errors
            try:
                self.prompt = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                time.sleep(0.02)


def test_a_reader_who_leaves_does_not_spoil_the_report(model, tmp_path):
    os.mkfifo(tmp_path / "stdout")
    reader = os.open(tmp_path / "stdout", os.O_RDONLY | os.O_NONBLOCK)
    path = tmp_path / "run.json"
    program = WaitingForItsPrompt(model, tmp_path, f"report={path}")
    os.close(reader)
    os.write(program.prompt, TEXT.encode())
    os.close(program.prompt)
    assert program.wait(120) == 0, program.errors
    assert "Traceback" not in program.errors and "Exception" not in program.errors
    assert path.exists()


def test_an_interrupt_ends_in_one_line(model, tmp_path):
    program = WaitingForItsPrompt(model, tmp_path)
    time.sleep(0.2)
    os.kill(program.pid, signal.SIGINT)
    assert (program.wait(60), program.errors) == (130, "interrupted\n")
