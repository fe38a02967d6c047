"""Texts, ends and log-probabilities of answers, from tokens alone."""

from __future__ import annotations

import pytest

from launch.server.answer.logprobs import TokenTexts
from launch.server.answer.row_text import RowText
from launch.server.answer.usage import Usage
from launch.server.dialects.openai import CompletionForm
from launch.server.request.fields import read_completion
from runahead.config import GenerationOptions
from runahead.decoding.scored_tokens import ScoredToken
from runahead.report import TokenLogprobs
from tests.tokenizers_for_tests import KINDS, byte_level


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_make_the_text(kind: str) -> None:
    tokenizer, text = KINDS[kind](), "the größer naïve 中文字 🚢 hello"
    texts = TokenTexts(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [texts.text_and_bytes(token) for token in ids]
    data = b"".join(bytes(data or b"") for _, data in pieces)
    assert data.decode().lstrip() == text
    assert any("\ufffd" in piece for piece, _ in pieces), "a character is split over tokens"
    assert all(bytes(data or b"").decode(errors="replace") == piece for piece, data in pieces)


def test_special_tokens_have_their_names_and_a_model_without_texts_its_ids() -> None:
    tokenizer = byte_level()
    assert TokenTexts(tokenizer).text_and_bytes(tokenizer.eos_token_id) == ("<eos>", list(b"<eos>"))
    assert TokenTexts(None).text_and_bytes(7) == ("token_id:7", None)


def test_each_token_has_the_offset_of_its_text() -> None:
    tokenizer, text = byte_level(), "größer 中 hello world"
    row = RowText(tokenizer, set(), GenerationOptions(max_new_tokens=100, logprobs=0))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for token in ids:
        row.add(ScoredToken(token, TokenLogprobs(logprob=-1.0, top=[])))
    scored = row.take_scored()
    assert [each.token for each in scored] == ids and row.take_scored() == []
    for each in scored:
        piece = tokenizer.decode([each.token])
        if "\ufffd" not in piece:
            assert text[each.offset :].startswith(piece)


def test_tokens_of_one_text_are_one_entry_with_the_most_likely() -> None:
    tokenizer = byte_level()
    first, second = (tokenizer.convert_tokens_to_ids(piece) for piece in ("ä", "ã"))  # halves of characters
    row = RowText(tokenizer, set(), GenerationOptions(max_new_tokens=1, logprobs=2))
    row.add(ScoredToken(second, TokenLogprobs(logprob=-2.0, top=[(first, -0.5), (second, -2.0)])))
    form = CompletionForm("1", "m", read_completion({"prompt": "x"}, GenerationOptions()), TokenTexts(tokenizer))
    [choice] = form.whole([row], Usage(prompt=1))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]
    assert choice["logprobs"]["token_logprobs"] == [-2.0]


@pytest.mark.parametrize(("text", "reason"), [('{"a": 1}', "stop"), ('{"a": ', "length")])
def test_json_that_ends_before_its_time_does_not_pass_for_whole(text: str, reason: str) -> None:
    tokenizer = byte_level()
    options = GenerationOptions(max_new_tokens=100, json_schema="{}")
    row = RowText(tokenizer, {tokenizer.eos_token_id}, options)
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
        row.add(token)
    assert (row.content, row.finish_reason) == (text, reason)
