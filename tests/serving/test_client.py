"""OpenAI's own client, sync and async, against a server with a tiny random model on one rank."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any, Literal
from unittest import mock

import httpx2
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel, Field
from transformers import LlamaForCausalLM

from runahead import Engine, Model, ModelOptions, Ranks, RanksOptions
from runahead.config import Device, DType, ModelName
from tests.families import save_tiny_llama
from tests.serving.fakes import TOOLS_TEMPLATE, FakeEngine, chat_tokenizer, serving

HELLO: list[Any] = [{"role": "user", "content": "the letters of the captain"}]
ASKED: dict[str, Any] = {"model": "fake", "messages": HELLO, "max_tokens": 12}
TOLERANCE = 1e-4
"""Difference of log-probabilities in float32 that are computed at once and token by token."""

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "find_ship",
        "description": "Where a ship is.",
        "parameters": {"type": "object", "properties": {"ship": {"type": "string"}}, "required": ["ship"]},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def served(folder):
    options = ModelOptions(name=ModelName.hf, path=folder, dtype=DType.float32)
    model = Model.load(options, torch.device("cpu"))
    with (
        Ranks.start(RanksOptions(device=Device.cpu)) as ranks,
        serving(engine=Engine(model, ranks), tokenizer=chat_tokenizer()) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def client(served):
    return OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def theirs(folder):
    """transformers' own model of the same weights."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected_logprobs(theirs: Any, text: str, new_ids: list[int]) -> torch.Tensor:
    """Log-softmax of a plain forward at the place of each new token after a text."""
    tokenizer = chat_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        logits = theirs(input_ids=torch.tensor([ids + new_ids])).logits[0]
    return logits[len(ids) - 1 : -1].log_softmax(-1)


def test_sync_and_async_clients_get_the_same_answer_whole_and_streamed(served, client):
    whole = client.chat.completions.create(**ASKED)

    async def several() -> list[str]:
        async with AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as other:
            answers = await asyncio.gather(*(other.chat.completions.create(**ASKED) for _ in range(3)))
            stream = await other.chat.completions.create(**ASKED, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return [*(answer.choices[0].message.content or "" for answer in answers), streamed]

    assert set(asyncio.run(several())) == {whole.choices[0].message.content}
    streamed = client.chat.completions.create(**ASKED, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole.choices[0].message.content


def test_log_probabilities_of_a_chat_are_those_of_a_plain_forward(client, theirs):
    asked = ASKED | {"logprobs": True, "top_logprobs": 4, "logit_bias": {"100": 100}, "max_tokens": 6}
    asked |= {"frequency_penalty": 2.0}
    choice = client.chat.completions.create(**asked).choices[0]
    content = choice.logprobs.content
    assert len(content) == 6
    tokenizer = chat_tokenizer()
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    new_ids = [100] * 6  # the bias decides; log-probabilities are those of the model, before it
    expected = expected_logprobs(theirs, text, new_ids)
    for place, each in enumerate(content):
        assert each.logprob == pytest.approx(float(expected[place, 100]), abs=TOLERANCE)
        largest = expected[place].topk(4)
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(largest.values.tolist(), abs=TOLERANCE)
        assert [bytes(top.bytes).decode(errors="replace") for top in each.top_logprobs] == [
            tokenizer.decode([token]) for token in largest.indices.tolist()
        ]
    assert sum(each.logprob for each in content) == pytest.approx(float(expected[:, 100].sum()), abs=6 * TOLERANCE)


def test_a_greedy_token_is_the_most_likely_one_and_its_bytes_make_the_text(client):
    choice = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2).choices[0]
    for each in choice.logprobs.content:
        assert each.logprob == each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob
        assert each.bytes == each.top_logprobs[0].bytes
    data = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
    assert data.decode(errors="replace").startswith((choice.message.content or "").rstrip("\ufffd"))
    only = client.chat.completions.create(**ASKED, logprobs=True).choices[0]
    assert [each.top_logprobs for each in only.logprobs.content] == [[]] * 12
    assert client.chat.completions.create(**ASKED).choices[0].logprobs is None


def test_a_stream_has_the_log_probabilities_of_the_whole_answer(client):
    asked = ASKED | {"logprobs": True, "top_logprobs": 1, "temperature": 1.0, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    content: list[list[Any]] = [[], []]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            content[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice in whole.choices:
        assert len(choice.logprobs.content) == 12
        for ours, streamed in zip(choice.logprobs.content, content[choice.index], strict=True):
            assert (ours.token, ours.bytes) == (streamed.token, streamed.bytes)
            assert ours.logprob == pytest.approx(streamed.logprob, abs=TOLERANCE)


def test_log_probabilities_of_a_completion(client, theirs):
    asked: dict[str, Any] = {"model": "fake", "prompt": "hello world", "max_tokens": 8}
    choice = client.completions.create(**asked, logprobs=3).choices[0]
    scores = choice.logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.text_offset) == 8
    assert scores.text_offset[0] == 0 and scores.text_offset == sorted(scores.text_offset)
    assert scores.text_offset[-1] <= len(choice.text)
    for token, logprob, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    tokenizer = chat_tokenizer()
    ids = tokenizer("hello world")["input_ids"]
    with torch.inference_mode():
        first = theirs(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    assert scores.token_logprobs[0] == pytest.approx(float(first.max()), abs=TOLERANCE)
    chunks = list(client.completions.create(**asked, logprobs=3, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [offset for part in parts for offset in part.text_offset] == scores.text_offset
    assert [token for part in parts for token in part.tokens] == scores.tokens


class Sighting(BaseModel):
    """The schema of the answer."""

    ship: Literal["Terror", "Erebus"]
    miles: Annotated[int, Field(ge=0, le=90)]
    seen: bool
    by: list[Literal["captain", "sister"]] = Field(max_length=2)


@pytest.mark.parametrize("seed", [1, 2])
def test_an_answer_follows_a_schema(client, seed):
    asked = ASKED | {"max_tokens": 200, "temperature": 1.5, "seed": seed}
    sighting = client.chat.completions.parse(**asked, response_format=Sighting).choices[0].message.parsed
    assert isinstance(sighting, Sighting)
    streamed = client.chat.completions.create(
        **asked,
        stream=True,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "sighting", "strict": True, "schema": Sighting.model_json_schema()},
        },
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    Sighting.model_validate_json(text)


def test_a_response_and_a_message_follow_a_schema(served, client):
    asked: dict[str, Any] = {"model": "fake", "temperature": 1.0, "extra_body": {"seed": 1}}
    found = client.responses.parse(**asked, input="the letters", max_output_tokens=200, text_format=Sighting)
    assert isinstance(found.output_parsed, Sighting)
    tool = {"name": "see", "input_schema": Sighting.model_json_schema()}
    body = {"model": "fake", "max_tokens": 200, "messages": HELLO, "temperature": 1.0, "seed": 1}
    config = {"output_config": {"format": {"type": "json_schema", "schema": Sighting.model_json_schema()}}}
    forced = {"tools": [tool], "tool_choice": {"type": "tool", "name": "see"}}
    formatted, called = (
        httpx2.post(served.url + "/v1/messages", json=body | more, timeout=60).json() for more in (config, forced)
    )
    Sighting.model_validate_json(formatted["content"][0]["text"])
    [call] = called["content"]
    assert (called["stop_reason"], call["name"]) == ("tool_use", "see")
    Sighting.model_validate(call["input"])


def test_rows_with_and_without_a_format_share_a_batch_and_any_object_is_an_object(client):
    asked = ASKED | {"max_tokens": 60, "temperature": 1.0, "seed": 5, "n": 3}
    free = client.chat.completions.create(**asked)
    answers = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    for choice in answers.choices:
        text = choice.message.content
        assert text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
    assert not any((choice.message.content or "").startswith("{") for choice in free.choices)


def test_a_schema_that_cannot_be_followed_is_a_400_that_names_the_field(client):
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(
            **ASKED,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "not": {"required": ["a"]}}},
            },
        )
    assert refused.value.body["param"] == "response_format"
    assert "not" in refused.value.body["message"]


def test_a_seed_repeats_an_answer_and_penalties_change_it(client):
    def answer(**more: Any) -> str:
        return client.chat.completions.create(**ASKED | {"max_tokens": 30} | more).choices[0].message.content

    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    plain = answer(**sampled)
    assert plain == answer(**sampled)
    for more in ({"seed": 12}, {"extra_body": {"min_p": 1.0}}):
        assert plain != answer(**sampled | more) == answer(**sampled | more)
    greedy = answer()
    for more in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert greedy != answer(**more) == answer(**more)


def test_sampled_answers_without_a_seed_take_those_that_generation_seed_begins():
    def seeds(seed: int) -> list[int]:
        with serving(engine=FakeEngine(), seed=seed) as served:
            client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
            asked = ASKED | {"max_tokens": 2}
            client.chat.completions.create(**asked, temperature=1.0, n=2)
            client.chat.completions.create(**asked)  # greedy: it takes none
            client.chat.completions.create(**asked, temperature=1.0, seed=77, n=2)
            client.completions.create(model="fake", prompt=["a", "b"], max_tokens=2, temperature=1.0)
            return [options.seed for options in served.engine.options]

    first = seeds(5)
    assert first == seeds(5)
    assert first[2:5] == [0, 77, 78] == seeds(6)[2:5]
    drawn = first[:2] + first[5:]
    assert len(set(drawn)) == 4 and not set(drawn) & set(seeds(6))


def test_tools_and_their_calls_are_in_the_prompt():
    with serving(tokenizer=chat_tokenizer(TOOLS_TEMPLATE)) as served:
        client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        function = {"name": "find_ship", "arguments": '{"ship": "Terror"}'}
        messages: list[Any] = [
            *HELLO,
            {"role": "assistant", "tool_calls": [{"id": "call-1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "call-1", "content": "in the ice"},
        ]
        for more, is_told in (({}, True), ({"tool_choice": "auto"}, True), ({"tool_choice": "none"}, False)):
            answer = client.chat.completions.create(model="fake", messages=messages, tools=[TOOL], max_tokens=3, **more)
            assert answer.choices[0].message.tool_calls is None, "it calls none"
            prompt = chat_tokenizer().decode(served.engine.batches[-1][0])
            assert ("<tool>" in prompt and "Where a ship is." in prompt) == is_told
            assert "<call>call-1 find_ship Terror" in prompt
            assert "tool: in the icecall-1" in prompt
        assert isinstance(
            next(iter(client.chat.completions.create(**ASKED, tools=[TOOL], stream=True))).choices[0].delta.role, str
        )


def test_a_server_without_the_extra_names_it():
    missing = mock.patch.dict(sys.modules, {"llguidance": None, "llguidance.hf": None})
    with missing, serving() as served:
        client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(**ASKED, response_format={"type": "json_object"})
        assert refused.value.body["param"] == "response_format"
        assert "pip install -e '.[guided]'" in refused.value.body["message"]
        assert client.chat.completions.create(**ASKED).choices[0].finish_reason == "length"
