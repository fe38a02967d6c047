"""Python functions that are read as schemas."""

# ruff: noqa: B018, B021 (strings that stand alone are the point)

from __future__ import annotations

import pytest

from policies.prompt_cache import PMLError, PromptCache, Schema, prompt_program
from policies.prompt_cache.program import system, user
from policies.prompt_cache.schema import Module, Param, Union
from tests.prompt_cache.serving import chatting
from tests.tokenizers_for_tests import byte_level


@prompt_program(days=6)
def beach(days: str, surfs: bool = False) -> None:
    f"Beaches for {days}. "
    if surfs:
        "Waves. "


@prompt_program(duration=8)
def trip(duration: str, city: str, long: bool) -> None:
    f"Plan a trip of {duration}. "
    if long:
        "Take your time. "
    else:
        "Hurry. "
    match city:
        case "miami":
            beach(duration, surfs=long)
        case "new york":
            "Bridges. "
        case _:
            "Streets. "


def names(schema: Schema) -> list[str]:
    return list(schema.places)


def told(asked: PromptCache, prompt: object) -> str:
    return byte_level().decode(asked.prompt(prompt).ids)  # type: ignore[arg-type]


def test_branches_are_modules_and_unions_and_calls_are_nested_modules() -> None:
    text, param, dot, choice, match = trip.schema.children
    assert (text, dot) == ("Plan a trip of ", ". ")
    assert isinstance(param, Param) and (param.name, param.num_tokens) == ("duration", 8)
    assert isinstance(choice, Union) and [each.name for each in choice.members] == ["long", "no-long"]
    assert isinstance(match, Union)
    assert [each.name for each in match.members] == ["city.miami", "city.new-york", "city.other"]
    [call] = match.members[0].children
    assert isinstance(call, Module) and call.name == "beach"
    assert trip.schema.ancestors("surfs") == ["city.miami", "beach"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"city": "miami", "long": True}, "Plan a trip of 3 d. Take your time. Beaches for 3 d. Waves. Go!"),
        ({"city": "miami", "long": False}, "Plan a trip of 3 d. Hurry. Beaches for 3 d. Go!"),
        ({"city": "new york", "long": False}, "Plan a trip of 3 d. Hurry. Bridges. Go!"),
        ({"city": "rome", "long": True}, "Plan a trip of 3 d. Take your time. Streets. Go!"),
    ],
)
def test_a_call_is_the_prompt_that_the_function_would_write(values: dict[str, object], text: str) -> None:
    cache = PromptCache(trip.schema, byte_level())
    assert told(cache, trip.prompt("Go!", duration="3 d", **values)) == text


def test_elif_takes_the_first_condition_that_holds() -> None:
    @prompt_program()
    def pick(a: bool, kind: str) -> None:
        if a:
            "first"
        elif kind == "x":
            "second"
        elif not a:
            "third"

    assert names(pick.schema) == ["a", "kind.x", "no-a"]
    cache = PromptCache(pick.schema, byte_level())
    for values, text in (((True, "x"), "first"), ((False, "x"), "second"), ((False, "y"), "third")):
        assert told(cache, pick.prompt(a=values[0], kind=values[1])) == text


def test_with_is_a_message() -> None:
    @prompt_program(question=9)
    def chat(question: str) -> None:
        with system():
            "Be short."
        with user():
            f"{question}"

    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    cache = PromptCache(chat.schema, chatting(template))
    assert told(cache, chat.prompt(question="why")) == "<system>Be short.\n<user>why\n"


def test_a_prompt_of_another_program_is_refused() -> None:
    cache = PromptCache(trip.schema, byte_level())
    with pytest.raises(PMLError, match="is of beach, not of trip"):
        cache.prompt(beach.prompt(days="1"))
    with pytest.raises(TypeError, match="missing a required argument"):
        trip.prompt(duration="1")


@prompt_program()
def itself(a: bool) -> None:
    "text"
    if a:
        itself(a)


@prompt_program()
def loops(a: list[str]) -> None:
    for each in a:
        f"{each}"


@prompt_program()
def unbounded(a: str) -> None:
    f"{a}"


@prompt_program(a=3)
def computes(a: str) -> None:
    f"{a.upper()}"


@prompt_program()
def calls(a: str) -> None:
    print(a)


@prompt_program()
def twice(a: bool) -> None:
    beach("1")
    beach("2")


@prompt_program()
def compares(a: int) -> None:
    if a > 3:
        "text"


@prompt_program()
def silent(a: int) -> None:
    pass


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (itself, "itself contains itself; modules cannot recur"),
        (loops, "a prompt program takes strings, if, match, with, pass and calls of others"),
        (unbounded, "{a} needs a length in tokens; write @prompt_program(a=16)"),
        (computes, "only arguments of the function may stand in {}"),
        (calls, "is no call of a prompt program"),
        (twice, "beach is also the name of the module in line"),
        (compares, "a condition is an argument, `not` an argument, or `argument == constant`"),
        (silent, "has no text"),
    ],
)
def test_what_a_schema_cannot_do_is_refused_with_its_line(program, message: str) -> None:
    with pytest.raises(PMLError) as caught:
        program.schema
    assert message in str(caught.value) and "test_programs.py:" in str(caught.value) and "\n" not in str(caught.value)


def test_a_bound_for_no_argument_is_refused() -> None:
    with pytest.raises(PMLError, match="has no argument b, for which a length is given"):
        prompt_program(b=3)(lambda a: None)
    with pytest.raises(PMLError, match="a=0 must be from 1 to"):
        prompt_program(a=0)(lambda a: None)
