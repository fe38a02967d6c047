"""Answers of a model without any sense are what the schema or grammar asks for that they were to follow."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from runahead.config import GenerationOptions, Guide
from runahead.decoding.sampling import Sampler, check_options, next_tokens
from runahead.model import grammars
from runahead.model.grammars import Grammars
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


def schemas(kind: str, more_logits: int = 0) -> Grammars:
    tokenizer = KINDS[kind]()
    return Grammars(tokenizer, len(tokenizer) + more_logits, {tokenizer.eos_token_id})


def schema_guide(schema: str | dict[str, Any]) -> Guide:
    return Guide(text=schema if isinstance(schema, str) else json.dumps(schema), is_schema=True)


def answer(made: Grammars, guide: Guide, seed: int, num_tokens: int = 300) -> tuple[str, bool]:
    """Text of an answer by a model that finds all tokens about as likely, and whether it has ended by itself."""
    tokenizer = made._tokenizer
    assert tokenizer is not None
    sampler = Sampler(GenerationOptions(do_sample=True), seed, CPU, constraint=made.constraint(guide))
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
    text, has_ended = answer(schemas(kind, more_logits=11), schema_guide(PERSON), seed)
    assert has_ended
    value = json.loads(text)
    assert list(value) == PERSON["required"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 6
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert value["kind"] in ("captain", "sister")
    assert len(value["letters"]) <= 3 and all(type(each) is bool for each in value["letters"])


def test_rows_do_not_share_where_they_are() -> None:
    made = schemas("byte_level")
    first, second = (made.constraint(schema_guide({"type": "object"})) for _ in range(2))
    before = second.allowed(CPU)
    brace = byte_level()("{", add_special_tokens=False)["input_ids"][0]
    assert before.sum() >= 1 and before[brace]
    first.add(brace)
    assert torch.equal(second.allowed(CPU), before)
    assert not torch.equal(first.allowed(CPU), before)


def test_after_the_json_only_the_end_token_is_allowed() -> None:
    constraint, tokenizer = schemas("byte_level").constraint(const(7)), byte_level()
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
        schemas("byte_level").check(schema_guide(schema))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_missing_is_named() -> None:
    tokenizer = byte_level()
    missing = mock.patch.dict(sys.modules, {"llguidance": None, "llguidance.hf": None})
    with missing, pytest.raises(ValueError, match=r"pip install -e '.\[guided\]'"):
        Grammars(tokenizer, 400, {1}).check(schema_guide("{}"))
    with pytest.raises(ValueError, match="a model with a tokenizer"):
        Grammars(None, 400, {1}).check(schema_guide("{}"))
    with pytest.raises(ValueError, match="a model with an end token"):
        Grammars(tokenizer, 400, set()).check(schema_guide("{}"))


def const(number: int) -> Guide:
    return schema_guide({"const": number})


def test_the_schema_that_was_not_used_for_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MOST_GRAMMARS", 3)
    made, compiled = schemas("byte_level"), list[Guide]()
    compile_one = made._matcher
    monkeypatch.setattr(made, "_matcher", lambda guide: (compiled.append(guide), compile_one(guide))[1])
    for number in (1, 2, 3, 1, 4, 1, 3, 2):
        made.check(const(number))
    assert compiled == [const(number) for number in (1, 2, 3, 4, 2)]


def test_a_wrong_schema_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MOST_GRAMMARS", 1)
    made = schemas("byte_level")
    for _ in range(2):
        with pytest.raises(ValueError, match="robot"):
            made.check(schema_guide({"type": "robot"}))
    assert not made._compiled
    made.prepare(schema_guide({"type": "robot"}))
    with pytest.raises(ValueError, match="robot"):
        made.constraint(schema_guide({"type": "robot"}))


def test_a_schema_is_compiled_once_beside_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    made, gate, threads = schemas("byte_level"), threading.Event(), list[str]()
    made.warm_up()
    compile_one = made._matcher

    def slow(guide: Guide) -> Any:
        threads.append(threading.current_thread().name)
        assert gate.wait(20)
        return compile_one(guide)

    monkeypatch.setattr(made, "_matcher", slow)
    for _ in range(2):
        made.prepare(const(7))
    assert not made.is_prepared(const(7), 0.01)
    gate.set()
    assert made.is_prepared(const(7), 20)
    constraint = made.constraint(const(7))
    assert threads == ["grammars"] and constraint.allowed(CPU).any()
    made.check(const(8))  # which nobody prepared
    assert threads == ["grammars", threading.current_thread().name]


def test_the_vocabulary_is_read_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, times = schemas("byte_level"), list[int]()
    read = made._vocabulary_of_tokenizer
    monkeypatch.setattr(made, "_vocabulary_of_tokenizer", lambda: (times.append(1), read())[1])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(made.check, map(const, range(8))))
    made.warm_up()
    assert times == [1]
    Grammars(None, 400, {1}).warm_up()  # of a model that cannot follow a schema: nothing happens


CALLS = r"""start: "[" call (", " call)* "]" | call
call: "{\"name\": \"find\", \"arguments\": " %json {
    "type": "object", "properties": {"ship": {"$ref": "#/$defs/ship"}}, "required": ["ship"],
    "additionalProperties": false, "$defs": {"ship": {"enum": ["Terror", "Erebus"]}}
} "}"
"""


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_follows_a_grammar(kind: str) -> None:
    found = set()
    for seed in range(4):
        text, has_ended = answer(schemas(kind), Guide(text=CALLS, is_schema=False), seed)
        calls = json.loads(text) if has_ended else []
        for call in calls if isinstance(calls, list) else [calls]:
            assert call["name"] == "find" and call["arguments"]["ship"] in ("Terror", "Erebus") and len(call) == 2
            found.add(call["arguments"]["ship"])
    assert found


@pytest.mark.parametrize(("grammar", "reason"), [("start: nothing", "nothing"), ("start: (", ""), ("", "")])
def test_a_grammar_that_cannot_be_followed_is_refused_in_one_line(grammar: str, reason: str) -> None:
    with pytest.raises(ValueError, match="llguidance: ") as refused:
        schemas("byte_level").check(Guide(text=grammar, is_schema=False))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def allows(made: Grammars, guide: Guide, ids: list[int]) -> bool:
    """Whether all of these tokens and then the end may come."""
    constraint = made.constraint(guide)
    for token in [*ids, byte_level().eos_token_id]:
        if not constraint.allowed(CPU)[token]:
            return False
        constraint.add(token)
    return True


@pytest.mark.parametrize("is_schema", [True, False])
def test_a_free_part_may_come_first_and_ends_where_its_end_comes_first(is_schema: bool) -> None:
    made, tokenizer = schemas("byte_level"), byte_level()
    text = '{"const": 7}' if is_schema else 'start: "7"'

    def allowed(said: str, *free_part: str) -> bool:
        guide = Guide(text=text, is_schema=is_schema, free_part=(free_part[0], free_part[1]) if free_part else None)
        return allows(made, guide, tokenizer(said, add_special_tokens=False)["input_ids"])

    assert allowed("7") and not allowed("a</t>7")
    assert allowed("a </t> \n7", "", "</t>") and not allowed("7", "", "</t>")
    assert not allowed("a</t>b</t>7", "", "</t>")
    assert allowed("7", "<t>", "</t>") and allowed("<t>a\n7</t>\n\n7", "<t>", "</t>")
    assert not allowed("<t>a7", "<t>", "</t>") and not allowed("a</t>7", "<t>", "</t>")
    # An end that is a special token is that token, and no other.
    assert allowed("a b<|end|>7", "", "<|end|>")
    other = Guide(text=text, is_schema=is_schema, free_part=("", "<|end|>"))
    assert not allows(made, other, tokenizer("a b<|", add_special_tokens=False)["input_ids"])


def test_a_long_grammar_is_not_in_its_message() -> None:
    text = "start: " + "x" * 10_000
    with pytest.raises(ValueError, match=r"^generation.grammar=start: x.*cannot be followed.*; leave it out$") as told:
        check_options([GenerationOptions(grammar=text)], None, 400, Grammars(None, 400, {1}))
    assert "[...]" in str(told.value) and len(str(told.value)) < 500
