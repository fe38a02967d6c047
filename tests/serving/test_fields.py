"""Fields that other servers have: the least number of tokens, tokens that end an answer, grammars, tokens of texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from runahead import Engine, Model, ModelOptions, Ranks, RanksOptions
from runahead.config import Device, DType, ModelName
from tests.families import save_tiny_llama
from tests.serving.fakes import TEMPLATE, FakeEngine, Served, chat_tokenizer, serving
from tests.serving.test_api import CHAT, CLIENT, HELLO, TEXT, error_of, post


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a tiny random model."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=1024)
    model = Model.load(ModelOptions(name=ModelName.hf, path=folder, dtype=DType.float32), torch.device("cpu"))
    with (
        Ranks.start(RanksOptions(device=Device.cpu)) as ranks,
        serving(engine=Engine(model, ranks), tokenizer=chat_tokenizer()) as running,
    ):
        yield running


def answer(served: Served, **fields: Any) -> dict[str, Any]:
    """The choice of a completion that is sampled, with the number of its tokens."""
    body = {"prompt": "the ice", "max_tokens": 60, "temperature": 1.0, "seed": 3} | fields
    answered = post(served, TEXT, body)
    assert answered.status_code == 200, answered.text
    [choice] = answered.json()["choices"]
    return choice | {"tokens": answered.json()["usage"]["completion_tokens"]}


def test_an_answer_has_at_least_so_many_tokens_before_its_end(served: Served) -> None:
    end = chat_tokenizer().eos_token_id
    likely = {"logit_bias": {str(end): 100}}
    assert answer(served, **likely)["tokens"] == 1
    for least in (1, 7):
        found = answer(served, **likely, min_tokens=least)
        assert (found["tokens"], found["finish_reason"]) == (least + 1, "stop")
    letter = chat_tokenizer()("e", add_special_tokens=False)["input_ids"][0]
    likely = {"logit_bias": {str(letter): 100}, "stop_token_ids": [letter]}
    found = answer(served, **likely, min_tokens=5)
    assert (found["tokens"], found["finish_reason"]) == (6, "stop") and "e" not in found["text"]
    # Stop strings that are complete before do not count; the first that ends after it does.
    biased = {"logit_bias": {str(letter): 100}, "stop": "ee"}
    assert answer(served, **biased)["text"] == ""
    assert answer(served, **biased, min_tokens=5)["text"] == "eeee"
    # What the format wants goes first: after the JSON nothing may come but the end.
    constant = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}}
    assert answer(served, **constant, min_tokens=20)["text"] == "7"


@pytest.mark.parametrize("includes", [False, True])
def test_what_ended_an_answer_may_be_in_it(includes: bool) -> None:
    engine = FakeEngine()
    ids = engine.tokenizer("the ice and", add_special_tokens=False)["input_ids"]
    engine.says = [*ids, engine.tokenizer.convert_tokens_to_ids("<|end|>"), *ids]
    with serving(engine=engine) as served:

        def said(**fields: Any) -> str:
            body = {"prompt": "a", "max_tokens": 50, "include_stop_str_in_output": includes} | fields
            whole = post(served, TEXT, body).json()["choices"][0]
            events = post(served, TEXT, body | {"stream": True}).text.split("\n\n")
            parts = [json.loads(event[6:])["choices"][0]["text"] for event in events if event.startswith("data: {")]
            assert "".join(parts) == whole["text"] and whole["finish_reason"] == "stop"
            return whole["text"]

        assert said(stop=["ice", "e i"]) == ("the i" if includes else "th")
        assert said(stop=["<|end|>"]) == ("the ice and<|end|>" if includes else "the ice and")
        [last] = [token for token in ids if engine.tokenizer.decode([token]).endswith("d")][-1:]
        before = engine.tokenizer.decode(ids[: ids.index(last)])
        assert said(stop_token_ids=[last]) == (
            engine.tokenizer.decode(ids[: ids.index(last) + 1]) if includes else before
        )
        whole = "the ice and<|end|>the ice and"
        assert said(skip_special_tokens=False) == whole
        assert said() == whole.replace("<|end|>", "")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"a/[0-9]{2}\n?(b|\/)"}, r"a/[0-9]{2}\n?(b|/)"),
        ({"structured_outputs": {"regex": "(north|south)-[0-9]"}}, "(north|south)-[0-9]"),
        ({"guided_choice": ["the ice", 'a "b"', "größer"]}, 'the ice|a "b"|größer'),
        ({"structured_outputs": {"choice": ["x\ny"], "json": None}}, "x\ny"),
        ({"guided_json": '{"const": 7}'}, "7"),
        ({"structured_outputs": {"json": {"const": 7}}}, "7"),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 900, "temperature": 0.5}, r"\{.*"),
        ({"guided_grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]{3}/'}, "a[0-9]{3}"),
    ],
)
def test_answers_follow_what_guides_them(served: Served, fields: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        choice = answer(served, **({"seed": seed} | fields))
        assert re.fullmatch(pattern, choice["text"], re.DOTALL), choice["text"]
        assert choice["finish_reason"] == "stop" or fields.get("max_tokens")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 100_000}, "min_tokens"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "robot"}}, "guided_json"),
        ({"guided_json": '{"items":' * 61 + "{}" + "}" * 61}, "guided_json"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_grammar": "x" * 100_001}, "guided_grammar"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "guided_choice"),
    ],
)
def test_a_wrong_field_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    refused = post(served, TEXT, {"prompt": "a"} | fields)
    assert refused.status_code == 400 and error_of(refused)["param"] == param


def test_tokens_of_a_text_and_of_a_chat_are_those_of_a_prompt(served: Served) -> None:
    tokenizer = chat_tokenizer()
    told = post(served, "/tokenize", {"prompt": "the größer ice", "return_token_strs": True}).json()
    ids = tokenizer("the größer ice")["input_ids"]
    assert told["tokens"] == ids and told["count"] == len(ids) and told["max_model_len"] > 0
    assert told["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert post(served, "/detokenize", {"tokens": ids, "model": "fake"}).json() == {"prompt": "the größer ice"}
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert post(served, "/detokenize", {"tokens": [end]}).json() == {"prompt": "<|end|>"}
    chat = post(served, "/tokenize", HELLO).json()
    assert chat["tokens"] == tokenizer("user: hello world\nassistant:", add_special_tokens=False)["input_ids"]
    assert TEMPLATE.startswith("{% for message") and chat["token_strs"] is None
    usage = post(served, CHAT, HELLO | {"max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [], "prompt_cache": {"prompt": "<prompt/>"}}, "prompt_cache"),
        ("/tokenize", {"prompt": "a", "prompt_cache": {"prompt": "<prompt/>"}}, "prompt_cache"),
        ("/tokenize", HELLO | {"chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, "model"),
    ],
)
def test_what_has_no_tokens_is_named(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    refused = post(served, path, body)
    assert refused.status_code == (404 if param == "model" else 400) and error_of(refused)["param"] == param


def test_texts_are_turned_into_tokens_for_who_has_a_key_alone() -> None:
    from launch.server.keys import Keys
    from tests.serving.test_api import KEY

    with serving(keys=Keys([KEY])) as served:
        for path in ("/tokenize", "/detokenize"):
            assert post(served, path, {"prompt": "a", "tokens": [5]}).status_code == 401
            allowed = post(served, path, {"prompt": "a", "tokens": [5]}, headers={"authorization": f"Bearer {KEY}"})
            assert allowed.status_code == 200
        assert CLIENT.get(served.url + "/tokenize").status_code == 405
