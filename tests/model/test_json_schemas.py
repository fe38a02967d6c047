"""Answers of a model without any sense are JSON of the schema that they were to follow."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from runahead.config import GenerationOptions
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.model import json_schemas
from runahead.model.json_schemas import JSONSchemas
from tests.tokenizers_for_tests import KINDS, byte_level

CPU = torch.device("cpu")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["captain", "sister"]},
        "letters": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "letters"],
    "additionalProperties": False,
}


def schemas(kind: str, more_logits: int = 0) -> JSONSchemas:
    tokenizer = KINDS[kind]()
    return JSONSchemas(tokenizer, len(tokenizer) + more_logits, {tokenizer.eos_token_id})


def answer(made: JSONSchemas, schema: dict[str, Any], seed: int, num_tokens: int = 300) -> tuple[str, bool]:
    """Text of an answer by a model that finds all tokens about as likely, and whether it has ended by itself."""
    tokenizer = made._tokenizer
    assert tokenizer is not None
    options = GenerationOptions(do_sample=True, json_schema=json.dumps(schema))
    sampler = Sampler(options, seed, CPU, constraint=made.constraint(json.dumps(schema)))
    logits = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    for _ in range(num_tokens):
        [token] = next_tokens([sampler], torch.randn(1, made._vocab_size, generator=logits))
        assert token is not None
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(ids), True
        ids.append(token)
    return tokenizer.decode(ids), False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_has_the_schemas_properties_and_ends(kind: str, seed: int) -> None:
    text, has_ended = answer(schemas(kind, more_logits=11), PERSON, seed)
    assert has_ended
    value = json.loads(text)
    assert list(value) == PERSON["required"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 6
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert value["kind"] in ("captain", "sister")
    assert len(value["letters"]) <= 3 and all(type(each) is bool for each in value["letters"])


def test_rows_do_not_share_where_they_are() -> None:
    made = schemas("byte_level")
    first, second = made.constraint('{"type": "object"}'), made.constraint('{"type": "object"}')
    before = second.allowed(CPU)
    brace = byte_level()("{", add_special_tokens=False)["input_ids"][0]
    assert before.sum() >= 1 and before[brace]
    first.add(brace)
    assert torch.equal(second.allowed(CPU), before)
    assert not torch.equal(first.allowed(CPU), before)


def test_after_the_json_only_the_end_token_is_allowed() -> None:
    constraint, tokenizer = schemas("byte_level").constraint('{"const": 7}'), byte_level()
    for token in tokenizer("7", add_special_tokens=False)["input_ids"]:
        constraint.add(token)
    assert constraint.allowed(CPU).nonzero().flatten().tolist() == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "robot"}, "robot"),
        ({"type": "object", "not": {"required": ["a"]}}, "not"),
        ({"type": "object", "not": {"required": ["a"]}, "x-guidance": {"lenient": True}}, "not"),
        ({"$ref": "https://example.org/schema.json"}, ""),
        ({"enum": []}, ""),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_in_one_line(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match="llguidance: ") as refused:
        schemas("byte_level").check(json.dumps(schema))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_missing_is_named() -> None:
    tokenizer = byte_level()
    missing = mock.patch.dict(sys.modules, {"llguidance": None, "llguidance.hf": None})
    with missing, pytest.raises(ValueError, match=r"pip install -e '.\[guided\]'"):
        JSONSchemas(tokenizer, 400, {1}).check("{}")
    with pytest.raises(ValueError, match="a model with a tokenizer"):
        JSONSchemas(None, 400, {1}).check("{}")
    with pytest.raises(ValueError, match="a model with an end token"):
        JSONSchemas(tokenizer, 400, set()).check("{}")


def const(number: int) -> str:
    return json.dumps({"const": number})


def test_the_schema_that_was_not_used_for_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schemas, "MOST_SCHEMAS", 3)
    made, compiled = schemas("byte_level"), list[str]()
    compile_one = made._matcher
    monkeypatch.setattr(made, "_matcher", lambda schema: (compiled.append(schema), compile_one(schema))[1])
    for number in (1, 2, 3, 1, 4, 1, 3, 2):
        made.check(const(number))
    assert compiled == [const(number) for number in (1, 2, 3, 4, 2)]


def test_a_wrong_schema_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schemas, "MOST_SCHEMAS", 1)
    made = schemas("byte_level")
    for _ in range(2):
        with pytest.raises(ValueError, match="robot"):
            made.check('{"type": "robot"}')
    assert not made._compiled
    made.prepare('{"type": "robot"}')
    with pytest.raises(ValueError, match="robot"):
        made.constraint('{"type": "robot"}')


def test_a_schema_is_compiled_once_beside_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    made, gate, threads = schemas("byte_level"), threading.Event(), list[str]()
    made.warm_up()
    compile_one = made._matcher

    def slow(schema: str) -> Any:
        threads.append(threading.current_thread().name)
        assert gate.wait(20)
        return compile_one(schema)

    monkeypatch.setattr(made, "_matcher", slow)
    for _ in range(2):
        made.prepare(const(7))
    assert not made.is_prepared(const(7), 0.01)
    gate.set()
    assert made.is_prepared(const(7), 20)
    constraint = made.constraint(const(7))
    assert threads == ["JSON schemas"] and constraint.allowed(CPU).any()
    made.check(const(8))  # which nobody prepared
    assert threads == ["JSON schemas", threading.current_thread().name]


def test_the_vocabulary_is_read_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, times = schemas("byte_level"), list[int]()
    read = made._vocabulary_of_tokenizer
    monkeypatch.setattr(made, "_vocabulary_of_tokenizer", lambda: (times.append(1), read())[1])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(made.check, map(const, range(8))))
    made.warm_up()
    assert times == [1]
    JSONSchemas(None, 400, {1}).warm_up()  # of a model that cannot follow a schema: nothing happens
