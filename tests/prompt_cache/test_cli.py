"""policy=prompt_cache and the program that encodes ahead, as a user runs them."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path

import pytest

from launch.encode import main as encode
from launch.infer import main as infer
from tests.exit_status import exit_status
from tests.families import save_tiny_llama
from tests.prompt_cache.serving import chatting
from tests.ranks.test_infer import torchrun

SCHEMA = """<schema name="ice">
  <system>Be short.</system>
  <user>
    <module name="letters">the letters of <param name="who" len="9"/> to his sister</module>
    <module name="ship">, a ship in the ice</module>
    <param name="question" len="20"/>
  </user>
</schema>"""
PROMPT = '<prompt schema="ice" question=" hello world"><letters who="the captain"/><ship/></prompt>'
CHAT = (
    "{% for m in messages %}<|end|>{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|end|>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), chatting(CHAT), initializer_range=0.3)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "ice.xml").write_text(SCHEMA, encoding="utf-8")
    (tmp_path / "ask.xml").write_text(PROMPT, encoding="utf-8")
    return tmp_path


def options(model: str, folder: Path, *more: str) -> list[str]:
    return [
        "model=hf",
        f"model.path={model}",
        "ranks.threads=1",
        "generation.max_new_tokens=5",
        "generation.ignore_eos=true",
        "policy=prompt_cache",
        f"policy.schema={folder / 'ice.xml'}",
        *more,
    ]


def report(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("bits", ["null", "4"])
def test_a_prompt_is_answered_from_what_was_encoded_ahead(model: str, files: Path, capfd, bits: str) -> None:
    store, run = files / "store", files / "run.json"
    ahead = ["model=hf", f"model.path={model}", f"schema={files / 'ice.xml'}", f"out={store}", f"tier_bits={bits}"]
    assert encode(ahead) == 0
    assert "3 of 3 encoded" in capfd.readouterr().out
    asked = [f"policy.store={store}", f"prompt.file={files / 'ask.xml'}", f"report={run}", f"cache.tier_bits={bits}"]
    assert infer(options(model, files, *asked)) == 0
    out, err = capfd.readouterr()
    told = report(run)
    assert out == f"{told['text']}\n" and "tokens reused" in err
    reuse = told["ranks"][0]["reuse"]  # type: ignore[index]
    assert reuse["encoded_tokens"] == 0 and list(reuse["found_bytes"]) == ["disk"]
    assert reuse["cached_tokens"] + reuse["computed_tokens"] == told["prompt_tokens"]
    assert ("cache" in told) == (bits == "4")
    assert told["policy"] == {"name": "prompt_cache", "schema": str(files / "ice.xml"), "store": str(store)}


def test_encoding_ahead_on_a_full_disk_ends_with_an_error(model: str, files: Path, capfd, monkeypatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    store = files / "store"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what serves a prompt tells, too
        ended = exit_status(encode, ["model=hf", f"model.path={model}", f"schema={files / 'ice.xml'}", f"out={store}"])
    assert ended == 1 and "No space left on device" in capfd.readouterr().err
    assert list(store.glob("*.safetensors")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="full"),
        pytest.param(
            ["policy.retrieve={name:clusterkv,first_layer:0,min_tokens:0,cluster:4,recent:4,sinks:1,fetch:0.6}"],
            id="retrieved",
        ),
    ],
)
def test_two_ranks_share_the_encoding_and_the_new_text(model: str, files: Path, more: list[str]) -> None:
    store = files / "store"
    alone, both = files / "alone.json", files / "both.json"
    ask = f"prompt.file={files / 'ask.xml'}"
    assert infer(options(model, files, ask, f"report={alone}", *more)) == 0
    done = torchrun(*options(model, files, ask, f"policy.store={store}", f"report={both}", *more))
    assert done.returncode == 0, done.stderr
    one, two = report(alone), report(both)
    assert one["new_token_ids"] == two["new_token_ids"] and one["prompt_tokens"] == two["prompt_tokens"]
    encoded = [rank["reuse"]["encoded_tokens"] for rank in two["ranks"]]  # type: ignore[attr-defined]
    assert min(encoded) > 0 and sum(encoded) == one["ranks"][0]["reuse"]["encoded_tokens"]  # type: ignore[index]
    computed = [rank["reuse"]["computed_tokens"] for rank in two["ranks"]]  # type: ignore[attr-defined]
    assert sum(computed) == one["ranks"][0]["reuse"]["computed_tokens"]  # type: ignore[index]


def test_prompts_in_a_file_of_lines_run_together(model: str, files: Path, capfd) -> None:
    path = files / "asks.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (PROMPT, PROMPT.replace("<ship/>", ""))))
    assert infer(options(model, files, f"prompt.file={path}", "prompt.batch=2")) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1] and lines[0]["prompt_tokens"] > lines[1]["prompt_tokens"]


def test_prompts_that_cannot_be_used_are_left_out_where_that_is_asked_for(model: str, files: Path, capfd) -> None:
    """Lines that are no JSON, no PML or too long, and ones that ask for another module. The others are answered."""
    valid = [PROMPT, PROMPT.replace("<ship/>", "")]
    invalid = ["hello", PROMPT.replace("<ship/>", "<shi/>"), PROMPT.replace("</prompt>", "long " * 600 + "</prompt>")]
    lines = [json.dumps(each) for each in (valid[0], *invalid, valid[1])]
    (files / "asks.jsonl").write_text("\n".join(["{broken", *lines]))
    (files / "valid.jsonl").write_text("\n".join(map(json.dumps, valid)))
    found = []
    for name in ("valid", "asks"):
        given = [f"prompt.file={files / name}.jsonl", "prompt.batch=2", "prompt.skip_invalid=true"]
        assert infer(options(model, files, *given)) == 0
        found.append([json.loads(line) for line in capfd.readouterr().out.splitlines()])
    alone, beside = found
    told = {line["index"]: line["error"] for line in beside if "error" in line}
    says = {0: "line 1 is not JSON", 2: "line 3 is no prompt in PML", 3: "<shi>", 4: "of the model's 512"}
    assert told.keys() == says.keys() and all(says[index] in told[index] for index in says), told
    answers = [line["new_token_ids"] for line in beside if "error" not in line]
    assert answers == [line["new_token_ids"] for line in alone] and len(answers) == 2


@pytest.mark.parametrize("program", ["infer", "encode"])
def test_layout_prints_a_table_and_runs_nothing(model: str, files: Path, capfd, program: str) -> None:
    if program == "infer":
        assert infer(["--layout", *options(model, files, f"prompt.file={files / 'ask.xml'}")]) == 0
    else:
        assert encode(["--layout", "model=hf", f"model.path={model}", f"schema={files / 'ice.xml'}"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("schema ice: ") and "letters" in out and ("reused" in out) == (program == "infer")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["policy.schema=null"], "policy=prompt_cache needs policy.schema=<xml file>"),
        (["policy.schema=none.xml"], "policy.schema=none.xml does not exist"),
        (["policy.budget=3"], "policy: prompt_cache has no option budget; it has schema, store"),
        (["policy.positions=reencoded"], "does not go with policy=prompt_cache"),
        (["policy.host_bytes=lots"], "policy.host_bytes=lots is no size in bytes"),
        (["policy.link_tokens=-1"], "policy.link_tokens=-1 must not be negative"),
        (["policy.retrieve=snapkv"], "policy.retrieve=snapkv may drop tokens, which are counted by their places"),
        (["policy.recompute=1.5"], "policy.recompute=1.5 must be a share, from 0 to 1"),
        (["policy.sinks=400"], "policy.sinks=400 needs a schema that begins with as many tokens"),
        (["prefill=zigzag"], "policy=prompt_cache needs prefill=kv_runahead or prefill=single"),
        (["policy.recompute=0.5", "prefill.chunk_tokens=4"], "of which prefill.chunk_tokens=4 computes a part; leave"),
        (["prompt.chat=true"], "prompt.chat does not go with policy=prompt_cache"),
        (["prompt.question=why"], "prompt.question does not go with policy=prompt_cache"),
        (["prompt.file=null", "prompt.text=hello"], "prompt.text is no prompt in PML"),
        (["prompt.file=null"], "needs a prompt in PML"),
        (
            ["prompt.file=null", 'prompt.text=<prompt schema="ice"><shi/></prompt>'],
            "prompt.text:1: <shi>: schema ice has",
        ),
        (["generation.max_new_tokens=500"], "exceeds the model's 512 positions; use generation.max_new_tokens="),
    ],
)
@pytest.mark.sampled(3)
def test_mistakes_are_told_in_one_line(model: str, files: Path, capfd, more: list[str], message: str) -> None:
    status = exit_status(infer, options(model, files, f"prompt.file={files / 'ask.xml'}", *more))
    err = capfd.readouterr().err
    assert status != 0 and message in err and len(err.splitlines()) == 1, err


def test_the_encoder_tells_mistakes_in_one_line(model: str, files: Path, capfd) -> None:
    base = ["model=hf", f"model.path={model}"]
    assert encode(base) == 2
    assert "schema=<xml file> is missing" in capfd.readouterr().err
    assert encode([*base, f"schema={files / 'ice.xml'}", "tier_bits=3"]) == 2
    assert capfd.readouterr().err == "tier_bits=3 must be 8, 4 or 2, or null for the model's dtype\n"
    for more, message in (
        ([], "out=<folder> is missing"),
        ([f"out={files / 'ice.xml'}"], "is not a writable folder"),
        ([f"out={files / 'store'}", "disk_bytes=1KiB"], "more than disk_bytes=1,024"),
    ):
        assert exit_status(encode, [*base, f"schema={files / 'ice.xml'}", *more]) == 2
        err = capfd.readouterr().err
        assert message in err and len(err.splitlines()) == 1, err
