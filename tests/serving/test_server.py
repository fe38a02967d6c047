"""launch/serve.py as a user runs it: two ranks, a tiny random model, a real socket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from pydantic import BaseModel

from launch.serve import HELP, SERVE
from launch.server.options import ServeOptions, ServeRun
from runahead.files import cache_folder
from tests.families import save_tiny_llama
from tests.serving.fakes import chat_tokenizer
from tests.waiting import until
from tests.warm_program import NOTHING, WarmJob, free_port

ROOT = Path(__file__).resolve().parents[2]
SERVE_PY = ROOT / "launch" / "serve.py"
POSITIONS = 40_000  # so that an answer may go on for longer than a busy machine pauses
TEXT = "the letters of the captain to his sister, from the ice. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=POSITIONS)


class Job(WarmJob):
    """A server whose ranks are forked from a process that has imported the runtime."""

    def __init__(
        self, *options: str, ranks: int = 2, script: Path = SERVE_PY, environment: Mapping[str, str] = NOTHING
    ) -> None:
        self.port = free_port()
        given = [f"serve.port={self.port}", "ranks.threads=1", "partition=even", *options]
        super().__init__(script, [given] * ranks, environment)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx2.Client(base_url=self.url, timeout=60, trust_env=False)

    def wait_until_ready(self, seconds: float = 120.0) -> None:
        def is_ready() -> bool:
            assert all(rank.status is None for rank in self.ranks), [rank.errors for rank in self.ranks]
            try:
                return self.client.get("/ready").status_code == 200
            except httpx2.HTTPError:
                return False

        until(is_ready, seconds)

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> httpx2.Response:
        return self.client.post(path, json=body)

    def metric(self, name: str) -> float:
        lines = dict(line.rsplit(" ", 1) for line in self.client.get("/metrics").text.splitlines())
        return float(lines[name])


@contextmanager
def job(*options: str, **how: Any) -> Iterator[Job]:
    running = Job(*options, **how)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.kill()


def options(model: str, *more: str) -> list[str]:
    return ["model=hf", f"model.path={model}", "serve.ping_s=0.2", *more]


def test_options_are_those_of_conf():
    assert SERVE.compose([]) == ServeRun()


def test_help_and_the_file_of_defaults_name_every_option():
    """The page leaves to them what is seldom changed."""
    lines = (ROOT / "conf" / "serve.yaml").read_text(encoding="utf-8").splitlines()
    for option in fields(ServeOptions):
        assert f"serve.{option.name}" in HELP
        assert any(re.match(rf"\s+{option.name}:", line) for line in lines), option.name


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("serve.port=70000", "serve.port=70000 must be from 0"),
        ("serve.batch=0", "serve.batch=0 must be at least 1"),
        ("serve.hosts=['a.example:80']", "must be a list of names or addresses, without ports"),
        ("serve.tools=json", "serve.tools=json is not one of auto, hermes"),
        ("serve.reasoning=all", "serve.reasoning=all is not one of auto, think"),
        ("serve.template_kwargs={tools:[]}", "serve.template_kwargs=tools is no variable of a template"),
        ("serve.hosts=[]", "must be a list of names or addresses, without ports"),
        ("serve.cors_origins=[a.example]", "serve.cors_origins=a.example must be origins such as"),
        ("serve.itl_s=0", "serve.itl_s=0.0 must be a number of seconds above 0"),
        ("serve.decode_ranks=2", "serve.decode_ranks=2 must be 0, or 1 for a stage that only decodes"),
        (["serve.decode_ranks=1", "prefill=zigzag"], "prefill=zigzag does not go with serve.decode_ranks=1"),
        ("serve.drain_s=0", "serve.drain_s=0.0 must be a number of seconds above 0"),
        ("serve.schema_tokens=-1", "serve.schema_tokens=-1 must not be negative"),
        (["policy=prompt_cache", "decode=sharded"], "policy=prompt_cache needs decode=last in a server"),
        (["policy=prompt_cache", "prefill=tsp"], "policy=prompt_cache needs prefill=kv_runahead or prefill=single"),
        ("serve.prefix_cache_bytes=-1", "serve.prefix_cache_bytes=-1 must be a number of bytes"),
        ("serve.prefix_cache_bytes=most", "serve.prefix_cache_bytes=most must be a number of bytes, or auto"),
        ("serve.prefix_cache_bytes=0.5", "serve.prefix_cache_bytes=0.5 is not a whole number, or auto"),
        (["serve.prefix_host_bytes=9", "policy=h2o", "policy.budget=64"], "policy h2o decides by what is computed"),
        (["serve.prefix_cache_bytes=9", "policy=h2o", "policy.budget=64"], "policy h2o decides by what is computed"),
        (
            ["serve.prefix_cache_bytes=9", "serve.prefix_host_bytes=-1"],
            "prefix_host_bytes=-1 must be a number of bytes",
        ),
        (["serve.prefix_cache_bytes=9", "serve.prefix_disk_bytes=0"], "prefix_disk_bytes=0 must be at least 1"),
        (["serve.prefix_cache_bytes=9", "serve.prefix_folder=''"], "serve.prefix_folder= must name a folder"),
        *(
            (["serve.prefix_cache_bytes=0", given], f"{given} has no effect with serve.prefix_cache_bytes=0")
            for given in ("serve.prefix_folder=x", "serve.prefix_host_bytes=9", "serve.snapshot_tokens=9")
        ),
        (["serve.prefix_cache_bytes=9", "cache.tier_bits=4"], "cache.tier_bits=4 has no effect without serve.prefix_h"),
    ],
)
@pytest.mark.sampled(2)
def test_wrong_options_are_refused_in_one_line(argument, message):
    with pytest.raises(ValueError, match=message):
        SERVE.read([argument] if isinstance(argument, str) else argument)


def test_prefixes_go_with_policies_that_look_at_the_end_of_a_prompt_or_retrieve():
    for policy in (
        ["policy=exact_topk"],
        ["policy=snapkv", "policy.budget=64"],
        ["policy=per_rank", "policy.ranks.last={name:quest,page:4}"],
    ):
        run = SERVE.compose(["serve.prefix_cache_bytes=9", *policy])
        assert run.policy["name"] in policy[0]


def test_two_ranks_answer_stream_cancel_and_drain(model):
    without = "serve.prefix_cache_bytes=0"  # so that each answer is computed as the others are
    with job(*options(model, "policy=prompt_cache", "serve.model_name=letters", without)) as server:
        asked = {"prompt": TEXT, "max_tokens": 24}
        alone = server.post(asked).json()
        assert alone["usage"]["completion_tokens"] == 24
        stream = server.post(asked | {"stream": True}).text
        events = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == alone["choices"][0]["text"]

        several = server.post({"prompt": [TEXT, "the ice", TEXT[:200]], "max_tokens": 24}).json()
        assert several["choices"][0]["text"] == alone["choices"][0]["text"]
        sampled = [
            server.post({"prompt": "the ice", "temperature": 1, "seed": 5, "n": n, "max_tokens": 9}).json()
            for n in (1, 3)
        ]
        assert sampled[0]["choices"][0]["text"] == sampled[1]["choices"][0]["text"]
        assert len({choice["text"] for choice in sampled[1]["choices"]}) == 3

        schema = {"type": "array", "items": {"enum": ["ice", "ship"]}, "minItems": 2, "maxItems": 4}
        formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        asked_json = {
            "prompt": "the ice",
            "max_tokens": 99,
            "temperature": 2,
            "logprobs": 2,
            "response_format": formatted,
        }
        [choice] = server.post(asked_json).json()["choices"]
        assert set(json.loads(choice["text"])) <= {"ice", "ship"}
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] + "<eos>"
        assert len(choice["logprobs"]["top_logprobs"]) == len(choice["logprobs"]["token_logprobs"])

        client = OpenAI(base_url=server.url + "/v1", api_key="none")
        said = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=3)
        assert said.usage.completion_tokens == 3
        [listed] = client.models.list().data
        assert (listed.id, listed.max_model_len) == ("letters", POSITIONS)
        for name in ("letters", model, "hf"):  # the last is the value of model=
            assert client.models.retrieve(name) == listed

        state = server.client.get("/state").json()
        assert state["ranks"] == ["rank 0", "rank 1"] and state["prefill"] == "kv_runahead"
        assert [each["weights"] > 0 for each in state["memory"]] == [True, True]
        schema = f'<schema name="s"><module name="a">{TEXT}</module><module name="b">the ice </module></schema>'
        fields = {"prompt": '<prompt schema="s"><a/><b/></prompt>', "schema": schema}
        body = {"prompt": "hello", "max_tokens": 9, "prompt_cache": fields}
        first, second = server.post(body).json(), server.post(body).json()
        assert first["choices"] == second["choices"]
        found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
        assert found[0] == 0 < 40 < found[1] < second["usage"]["prompt_tokens"]

        too_long = server.post({"prompt": [5] * 2 * POSITIONS})
        assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "context_length_exceeded"

        endless = {"prompt": "the ice", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        before = server.metric("runahead:generation_tokens_total")
        with server.client.stream("POST", "/v1/completions", json=endless) as response:
            next(response.iter_lines())
        until(lambda: server.metric("runahead:num_requests_running") == 0)
        made = server.metric("runahead:generation_tokens_total") - before
        assert 1 <= made < 22_500, "a cancelled request was generated to its end"

        with server.client.stream("POST", "/v1/completions", json=endless | {"max_tokens": 1000}) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.ranks[1].pid, signal.SIGSTOP)  # the answer ends after what is asked here, not before
            for rank in server.ranks:  # twice, as systemd and torchrun together do
                os.kill(rank.pid, signal.SIGTERM)
                os.kill(rank.pid, signal.SIGTERM)
            until(lambda: server.client.get("/ready").status_code == 503)
            assert server.post(asked).status_code == 503
            os.kill(server.ranks[1].pid, signal.SIGCONT)
            os.kill(server.ranks[1].pid, signal.SIGTERM)  # of two at a process that is stopped one is left
            assert "data: [DONE]" in list(lines)
        assert [rank.wait(60) for rank in server.ranks] == [0, 0]
        assert "draining: 1 running, 0 waiting" in server.ranks[0].errors


def test_a_drain_that_another_rank_begins_ends_in_time(model):
    with job(*options(model, "serve.drain_s=1")) as server:
        endless = {"prompt": "the ice", "n": 8, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.ranks[1].pid, signal.SIGTERM)
            status = server.ranks[0].wait(60)
            assert status == 143, (status, server.ranks[0].errors, server.ranks[1].errors)
        assert "draining: 1 running, 0 waiting, 1 s at most" in server.ranks[0].errors


def test_short_prompts_are_answered_while_a_long_one_is_decoded(model):
    prefixes = "serve.prefix_cache_bytes=100000000", "serve.snapshot_tokens=64"
    with job(*options(model, "serve.itl_s=0.05", *prefixes)) as server:
        assert "serve.snapshot_tokens=64 has no effect: no layer of model" in server.ranks[0].errors
        endless = {"prompt": TEXT * 5, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=endless) as response:
            lines = response.iter_lines()
            while not next(lines).startswith("data: "):
                pass
            short = server.post({"prompt": "the ice", "max_tokens": 3})
            assert short.json()["usage"]["completion_tokens"] == 3
            # The rest of a long one is short, too.
            usage = server.post({"prompt": TEXT * 5 + "the ship", "max_tokens": 3}).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert 0.9 * usage["prompt_tokens"] < cached < usage["prompt_tokens"]
            assert server.metric("runahead:num_requests_running") == 1
            long = server.post(endless | {"max_tokens": 200}).text
            assert long.count("data: {") > 1 and long.endswith("data: [DONE]\n\n")
            next(lines)  # the first one goes on


def test_prefixes_are_reused_without_an_option_and_it_is_told(model):
    with job(*options(model)) as server:
        found = re.search(r"; prefixes are kept in half of what these leave of ([\d,]+) bytes", server.ranks[0].errors)
        limit = server.metric("runahead:prefix_cache_limit_bytes")
        assert found is not None and limit == int(found[1].replace(",", "")) // 2 > 0
        asked = [{"prompt": TEXT * 5 + question, "max_tokens": 3} for question in ("the ship", "the ice")]
        usages = [server.post(each).json()["usage"] for each in asked]
        cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usages]
        assert cached[0] == 0 and 0.9 * usages[1]["prompt_tokens"] < cached[1] < usages[1]["prompt_tokens"]
        assert 0 < server.metric("runahead:prefix_cache_bytes") <= limit
        assert server.client.get("/state").json()["stored"]["most_bytes"] == limit


def test_where_something_else_is_in_the_way_no_prefixes_are_reused_and_it_is_told(model):
    with job(*options(model, "policy=h2o", "policy.budget=64"), ranks=1) as server:
        assert "; prefixes are not reused: policy h2o decides by what is computed" in server.ranks[0].errors
        assert "leave the tree out" not in server.ranks[0].errors
        assert server.metric("runahead:prefix_cache_limit_bytes") == 0
        usages = [server.post({"prompt": TEXT, "max_tokens": 3}).json()["usage"] for _ in range(2)]
        assert [each["prompt_tokens_details"]["cached_tokens"] for each in usages] == [0, 0]


@pytest.mark.slow
def test_a_server_finds_what_the_one_before_has_kept(model, tmp_path):
    kept = "serve.prefix_cache_bytes=100000000", f"serve.prefix_folder={tmp_path / 'prefixes'}"
    ask = {"prompt": TEXT * 5, "max_tokens": 8}
    usages, answers = [], []
    for _ in range(2):
        with job(*options(model, "serve.itl_s=0.05", *kept)) as server:
            answer = server.post(ask).json()
            usages.append(answer["usage"])
            answers.append(answer["choices"][0]["text"])
            assert server.metric('runahead:prefix_cache_tier_bytes{tier="device"}') > 0
            assert list(json.loads(server.client.get("/state").text)["prefixes"]) == ["device", "disk"]
            os.kill(server.ranks[0].pid, signal.SIGTERM)
            assert [rank.wait(60) for rank in server.ranks] == [0, 0]
    assert answers[0] == answers[1]
    assert [each["prompt_tokens_details"]["cached_tokens"] for each in usages] == [0, usages[0]["prompt_tokens"] - 1]


def client_lines() -> tuple[list[str], list[str]]:
    """The commands of docs/server.md that ask a server, and its blocks of Python, in order."""
    page, curl = (ROOT / "docs" / "server.md").read_text(encoding="utf-8"), r"^    (curl (?:.*\\\n)*.*)"
    commands = re.findall(curl, page, flags=re.MULTILINE)
    blocks = re.findall(r"(?:^    .*\n|^\n)+", re.sub(curl, "", page, flags=re.MULTILINE), flags=re.MULTILINE)
    return commands, [textwrap.dedent(block) for block in blocks if "client." in block]


@pytest.mark.slow
def test_the_client_lines_of_the_page_run_on_the_real_model(capsys, tmp_path):
    assert cache_folder().exists()
    commands, blocks = client_lines()
    assert len(commands) >= 4 and len(blocks) >= 5
    with (
        job("model=smollm2", "policy=prompt_cache", f"policy.schema={ROOT / 'examples/cities.xml'}") as server,
        job("model=smollm2", f"serve.handover={tmp_path}") as handing_over,
    ):
        for command in commands:
            asked = handing_over if "v1/prefill" in command else server
            run = subprocess.run(
                command.replace("127.0.0.1:8000", f"127.0.0.1:{asked.port}"),
                shell=True,
                capture_output=True,
                text=True,
                check=True,
                timeout=200,
            )
            if "-N" in command:
                assert run.stdout.rstrip().endswith("data: [DONE]")
            elif asked is handing_over:
                assert Path(json.loads(run.stdout)["path"]).exists()
            elif "prompt_cache" in command:
                answer = json.loads(run.stdout)
                assert answer["choices"][0]["message"]["content"]
                assert answer["usage"]["prompt_tokens"] > 100
            elif "json_object" in command:
                [choice] = json.loads(run.stdout)["choices"]
                assert choice["text"].startswith("{")
                assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["text"]), dict)
            else:
                assert "Frankenstein" in json.loads(run.stdout)["choices"][0]["message"]["content"]
        names: dict[str, Any] = {"BaseModel": BaseModel}
        for block in blocks:
            exec(block.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"), names)
            assert capsys.readouterr().out.strip() or "print(" not in block
