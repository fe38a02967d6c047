"""Parts of answers in each form of calls: what is a call, what stays content, however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.server.answer.calls import CALL_FORMS, GUIDED, CallForm, JSONEnd, ToolForm, form_of_template
from launch.server.answer.parser import MOST_BETWEEN, MOST_WRONG, AnswerParser, Parts
from launch.server.answer.pieces import Kind, joined
from tests.examples import examples

HERMES, LLAMA, MISTRAL = (CALL_FORMS[form] for form in (ToolForm.hermes, ToolForm.llama3, ToolForm.mistral))
KNOWN = frozenset({"find", "sail"})
Said = list[tuple[str, ...]]
"""What is in an answer: ("content", text), ("reasoning", text), (name of a tool, its arguments)."""


def said(parts: Parts, pieces: Iterable[str]) -> Said:
    """What a parser makes of pieces of a text."""
    parser = AnswerParser(parts)
    found = [piece for text in pieces for piece in parser.add(text)] + parser.finish()
    calls = [piece for piece in joined(found) if piece.kind is Kind.call]
    assert [piece.number for piece in calls] == list(range(len(calls))) == list(range(parser.num_calls))
    assert len({piece.identity for piece in calls}) == len(calls) and all(piece.name for piece in calls)
    return [(piece.name or piece.kind.value, piece.text) for piece in joined(found)]


def call(name: str, **arguments: Any) -> tuple[str, str]:
    return name, json.dumps(arguments, ensure_ascii=False)


def of(calls: CallForm | None, **more: Any) -> Parts:
    return Parts(calls=calls, known=KNOWN, **more)


FIND = '{"name": "find", "arguments": {"ship": "Erebus"}}'
SAIL = '{"arguments": {"to": ["ice", {"x": "}]"}]}, "name": "sail"}'
TOLD_FIND, TOLD_SAIL = call("find", ship="Erebus"), call("sail", to=["ice", {"x": "}]"}])
QUOTED = '{"name": "find", "arguments": {"ship": "a \\"b\\" \\\\"}}'

CASES: dict[str, tuple[Parts, str, Said]] = {
    "no parts": (Parts(), " a <tool_call>\n", [("content", " a <tool_call>\n")]),
    # Hermes
    "hermes": (of(HERMES), f"<tool_call>\n{FIND}\n</tool_call>", [TOLD_FIND]),
    "hermes, two and content": (
        of(HERMES),
        f"Let me see.\n\n<tool_call>\n{FIND}\n</tool_call>\n<tool_call>{SAIL}</tool_call>\n",
        [("content", "Let me see."), TOLD_FIND, TOLD_SAIL],
    ),
    "hermes, at most one": (
        of(HERMES, at_most_one=True),
        f"<tool_call>{FIND}</tool_call><tool_call>{SAIL}</tool_call>",
        [TOLD_FIND],
    ),
    "hermes, content after": (
        of(HERMES),
        f"<tool_call>{FIND}</tool_call>\n so \n",
        [TOLD_FIND, ("content", "so")],
    ),
    "hermes, any name": (of(HERMES), '<tool_call>{"name": "fly"}</tool_call>', [call("fly")]),
    "hermes, arguments as text": (
        of(HERMES),
        '<tool_call>{"name": "find", "arguments": "{\\"ship\\": \\"ü\\"}"}</tool_call>',
        [call("find", ship="ü")],
    ),
    "hermes, without its end": (of(HERMES), f"<tool_call>\n{FIND}\n", [TOLD_FIND]),
    "hermes, quotes": (of(HERMES), f"<tool_call>{QUOTED}</tool_call>", [call("find", ship='a "b" \\')]),
    "hermes, cut off": (of(HERMES), f"a \n<tool_call>\n{FIND[:-3]}", [("content", f"a \n<tool_call>\n{FIND[:-3]}")]),
    "hermes, no JSON": (
        of(HERMES),
        f"a <tool_call> find it </tool_call> <tool_call>{FIND}</tool_call>",
        [("content", "a <tool_call> find it </tool_call>"), TOLD_FIND],
    ),
    "hermes, wrong JSON": (
        of(HERMES),
        "<tool_call>{'name': 'find'}</tool_call>",
        [("content", "<tool_call>{'name': 'find'}</tool_call>")],
    ),
    "hermes, no number": (
        of(HERMES),
        '<tool_call>{"name": "find", "arguments": {"x": NaN}}</tool_call>',
        [("content", '<tool_call>{"name": "find", "arguments": {"x": NaN}}</tool_call>')],
    ),
    "hermes, too large a number": (
        of(HERMES),
        '<tool_call>{"name": "find", "arguments": {"x": 1e999}}</tool_call>',
        [("content", '<tool_call>{"name": "find", "arguments": {"x": 1e999}}</tool_call>')],
    ),
    "hermes, too large a number in arguments as text": (
        of(HERMES),
        '<tool_call>{"name": "find", "arguments": "{\\"x\\": -1e999}"}</tool_call>',
        [("content", '<tool_call>{"name": "find", "arguments": "{\\"x\\": -1e999}"}</tool_call>')],
    ),
    "hermes, no object": (
        of(HERMES),
        '<tool_call>{"name": "find", "arguments": [1]}</tool_call>',
        [("content", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>')],
    ),
    "hermes, text after the JSON": (
        of(HERMES),
        f"<tool_call>{FIND} now </tool_call>",
        [("content", f"<tool_call>{FIND} now </tool_call>")],
    ),
    "hermes, a call in a broken one": (
        of(HERMES),
        f'<tool_call>{{"name" <tool_call>{FIND}</tool_call>',
        [("content", '<tool_call>{"name"'), TOLD_FIND],
    ),
    "hermes, begun": (of(HERMES), "a <tool_c", [("content", "a <tool_c")]),
    "hermes, JSON is content": (of(HERMES), FIND, [("content", FIND)]),
    "hermes, content keeps its blanks": (of(HERMES), "\n a \n b\n\n", [("content", "\n a \n b\n\n")]),
    # Llama 3
    "llama": (of(LLAMA), '{"name": "find", "parameters": {"ship": "Erebus"}}', [TOLD_FIND]),
    "llama, function": (of(LLAMA), f'{{"type": "function", "function": {FIND}}}', [TOLD_FIND]),
    "llama, several": (of(LLAMA), f"{FIND}; {SAIL}\n{FIND};", [TOLD_FIND, TOLD_SAIL, TOLD_FIND]),
    "llama, token": (of(LLAMA), f"<|python_tag|>{FIND}", [TOLD_FIND]),
    "llama, another name": (
        of(LLAMA),
        '{"name": "Ada", "arguments": {}}',
        [("content", '{"name": "Ada", "arguments": {}}')],
    ),
    "llama, JSON": (of(LLAMA), ' {"ship": [1]} ', [("content", ' {"ship": [1]} ')]),
    "llama, list": (of(LLAMA), "[1, 2] and so on", [("content", "[1, 2] and so on")]),
    "llama, code": (of(LLAMA), "<|python_tag|>find.call()", [("content", "<|python_tag|>find.call()")]),
    "llama, inside of a text": (of(LLAMA), f"a {FIND}", [("content", f"a {FIND}")]),
    "llama, content after": (of(LLAMA), f"{FIND}\n\nso", [TOLD_FIND, ("content", "so")]),
    # Mistral
    "mistral": (of(MISTRAL), f"[TOOL_CALLS] [{FIND}, {SAIL}]", [TOLD_FIND, TOLD_SAIL]),
    "mistral, content": (of(MISTRAL), f"a[TOOL_CALLS][{FIND}]", [("content", "a"), TOLD_FIND]),
    "mistral, newer": (
        of(MISTRAL),
        '[TOOL_CALLS]find[ARGS]{"ship": "Erebus"}[TOOL_CALLS]sail[CALL_ID]abc[ARGS] {}',
        [TOLD_FIND, call("sail")],
    ),
    "mistral, no call": (of(MISTRAL), "[TOOL_CALLS] find it", [("content", "[TOOL_CALLS] find it")]),
    "mistral, empty list": (of(MISTRAL), "[TOOL_CALLS][]", [("content", "[TOOL_CALLS][]")]),
    "hermes, no name before the JSON": (
        of(HERMES),
        f"<tool_call>find[ARGS]{{}} <tool_call>{FIND}</tool_call>",
        [("content", "<tool_call>find[ARGS]{}"), TOLD_FIND],
    ),
    "mistral, a long name": (
        of(MISTRAL),
        f"[TOOL_CALLS]{'a' * 257}[ARGS]{{}}",
        [("content", f"[TOOL_CALLS]{'a' * 257}[ARGS]{{}}")],
    ),
    "mistral, a name alone": (of(MISTRAL), "[TOOL_CALLS]find[AR", [("content", "[TOOL_CALLS]find[AR")]),
    # led by a grammar
    "guided": (of(GUIDED), QUOTED, [("find", '{"ship": "a \\"b\\" \\\\"}')]),
    "guided, list": (of(GUIDED), f"[{FIND}, {QUOTED}]", [TOLD_FIND, ("find", '{"ship": "a \\"b\\" \\\\"}')]),
    "guided, cut off": (of(GUIDED), FIND[:-5], [("find", '{"ship": "Ereb')]),
    "guided, cut off before the second": (of(GUIDED), f'[{FIND}, {{"name": "fi', [TOLD_FIND]),
    "guided, cut off at the name": (of(GUIDED), '{"name": "fi', [("content", '{"name": "fi')]),
    # reasoning
    "reasoning": (
        Parts(reasons=True),
        "<think>\nSo <b\n</think>\n\nYes.\n",
        [("reasoning", "So <b"), ("content", "Yes.\n")],
    ),
    "reasoning, begun by the prompt": (
        Parts(reasons=True, in_reasoning=True),
        "\nSo </thin\n</think>\n\nYes.",
        [("reasoning", "So </thin"), ("content", "Yes.")],
    ),
    "reasoning, cut off": (Parts(reasons=True), "<think>So\n\n ", [("reasoning", "So\n\n ")]),
    "reasoning, none": (Parts(reasons=True), "\nYes </think> <think>", [("content", "\nYes </think> <think>")]),
    "reasoning, empty": (Parts(reasons=True), "<think>\n\n</think>\n\nYes", [("content", "Yes")]),
    "reasoning, almost": (Parts(reasons=True), " <thin", [("content", " <thin")]),
    "reasoning, then a call": (
        of(HERMES, reasons=True),
        f"<think>a <tool_call>{FIND}</tool_call></think>\n<tool_call>{SAIL}</tool_call>",
        [("reasoning", f"a <tool_call>{FIND}</tool_call>"), TOLD_SAIL],
    ),
    "reasoning, then a bare call": (
        of(LLAMA, reasons=True),
        f"<think>a</think>\n{FIND}",
        [("reasoning", "a"), TOLD_FIND],
    ),
    "reasoning, then a guided call": (
        of(GUIDED, reasons=True, in_reasoning=True),
        f"a</think>\n\n{FIND}",
        [("reasoning", "a"), TOLD_FIND],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_has_these_parts_wherever_it_is_cut(name: str) -> None:
    parts, text, expected = CASES[name]
    assert said(parts, [text]) == expected
    assert said(parts, text) == expected, "a character at a time"
    for place in range(1, len(text)):
        assert said(parts, [text[:place], text[place:]]) == expected, (text[:place], text[place:])


FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "<think>",
            "</think>",
        ),
        *(
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            ";",
            " ",
            "\n",
            "a",
            "find",
            FIND,
            SAIL,
            '{"name": "find", "arguments": ',
        ),
    ]
)


@examples(400)
@given(st.data())
def test_pieces_of_any_text_make_what_the_whole_makes(data: st.DataObject) -> None:
    forms = st.sampled_from([None, HERMES, LLAMA, MISTRAL, GUIDED])
    reasons = data.draw(st.booleans())
    parts = of(data.draw(forms), reasons=reasons, in_reasoning=reasons and data.draw(st.booleans()))
    fragments = data.draw(st.lists(FRAGMENTS, max_size=12))
    text = "".join(fragments)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert said(parts, pieces) == said(parts, [text]) == said(parts, text)


@examples(200)
@given(st.lists(FRAGMENTS, max_size=12))
def test_what_is_no_call_is_content_to_the_last_character(fragments: list[str]) -> None:
    text = "".join(fragments)
    for form in (HERMES, LLAMA, MISTRAL):
        found = said(of(form), [text])
        if all(kind == "content" for kind, *_ in found):
            assert "".join(each[1] for each in found) == text


def test_content_is_not_held_longer_than_it_has_to_be() -> None:
    parser = AnswerParser(of(HERMES))
    assert [piece.text for text in ("Let", " me", " <", "b>") for piece in parser.add(text)] == ["Let", " me", " <b>"]
    parser = AnswerParser(of(GUIDED))
    pieces = [parser.add(text) for text in ('{"name": "find", "arguments": {"sh', 'ip": "E', 'rebus"}', "}")]
    assert [[piece.text for piece in each] for each in pieces] == [['{"sh'], ['ip": "E'], ['rebus"}'], []]


def characters_read(parts: Parts, pieces: Iterable[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, Said]:
    """Characters in which the end of JSON was looked for, and what is in the text."""
    seen, real = 0, JSONEnd.find

    def find(self: JSONEnd, text: str, start: int) -> int | None:
        nonlocal seen
        end = real(self, text, start)
        seen += (len(text) if end is None else end) - start
        return end

    with monkeypatch.context() as patched:
        patched.setattr(JSONEnd, "find", find)
        found = said(parts, pieces)
    return seen, found


def cut(text: str, length: int) -> list[str]:
    return [text[start : start + length] for start in range(0, len(text), length)]


def test_reading_takes_time_in_proportion_to_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted characters, not seconds: a call of n pieces is scanned once, not n times."""
    text = '<tool_call>{"name": "find", "arguments": {"x": "' + "a" * 20_000
    seen, found = characters_read(of(HERMES), cut(text, 10), monkeypatch)
    assert seen == len(text) - len("<tool_call>") and found == [("content", text)]


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_marks_that_begin_no_call_make_little_be_read_anew(form: CallForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the marks is followed by JSON that never ends, of which nothing is known before the text's end."""
    text = f'{form.begin}{{"a": [' * 1000
    seen, found = characters_read(of(form), cut(text, 50), monkeypatch)
    assert seen <= MOST_WRONG * len(text) and found == [("content", text)]
    # After so many marks there are no calls any more, and one before these counts.
    assert said(of(form), [f"{form.begin}x " * (MOST_WRONG - 1) + form.begin + FIND])[-1] == TOLD_FIND
    wrong = f"{form.begin}x " * MOST_WRONG + form.begin + FIND
    assert said(of(form), [wrong]) == said(of(form), wrong) == [("content", wrong)]


@pytest.mark.parametrize("form", [None, HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("before", ["", "{begin}", "a", "{call}", "<think>a", "</think>"])
@pytest.mark.parametrize("more", [" ", "a"])
def test_what_is_held_before_a_call_has_a_bound(form: CallForm | None, before: str, more: str) -> None:
    """All that is held is looked at again with each piece, so it may not grow, unless it is JSON of a call."""
    parser = AnswerParser(of(form, reasons=True, in_reasoning=before == "</think>"))
    begin, end = (form.begin, form.end) if form else ("", "")
    parser.add(before.format(begin=begin, call=f"{begin}{FIND}{end}") if before != "</think>" else before)
    for _ in range(3000):
        parser.add(more)
        assert len(parser._held) + len(parser._dropped) <= 2 * MOST_BETWEEN + len(FIND)


BLANKS = st.sampled_from([0, 1, 1000, MOST_BETWEEN - 1, MOST_BETWEEN, MOST_BETWEEN + 1, 2500])


@examples(200)
@given(st.data())
def test_pieces_of_a_text_with_many_blanks_make_what_the_whole_makes(data: st.DataObject) -> None:
    reasons = data.draw(st.booleans())
    form = data.draw(st.sampled_from([HERMES, LLAMA, MISTRAL]))
    parts = of(form, reasons=reasons, in_reasoning=reasons and data.draw(st.booleans()))
    fragments = [(data.draw(BLANKS), data.draw(FRAGMENTS)) for _ in range(data.draw(st.integers(0, 5)))]
    text = "".join(" " * number + fragment for number, fragment in fragments) + " " * data.draw(BLANKS)
    assert said(parts, cut(text, data.draw(st.integers(1, 400)))) == said(parts, [text])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{% endif %}", ToolForm.hermes),
        ("[TOOL_CALLS]", ToolForm.mistral),
        ("<|python_tag|>", ToolForm.llama3),
        ("<|start_header_id|>{% if tools %}", ToolForm.llama3),
        ("<|start_header_id|>", ToolForm.none),
        ("{{ messages }}", ToolForm.none),
    ],
)
def test_a_template_tells_the_form_of_its_calls(template: str, form: ToolForm) -> None:
    assert form_of_template(template) is form
