"""Standard output carries the answer and nothing else, piece by piece, whoever reads it."""

import contextlib
import json
import os

import pytest

from launch.outputs.answers import AnswerStream, AnswerWriter
from runahead.config import GenerationOptions
from runahead.report import Generation
from tests.tokenizers_for_tests import byte_level


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):  # the test may have closed it
            os.close(descriptor)


def read(descriptor: int) -> str:
    try:
        return os.read(descriptor, 1 << 20).decode()
    except BlockingIOError:
        return ""


STOP = GenerationOptions(stop=["tain"])


def test_the_stream_shows_text_as_soon_as_it_is_sure(pipe):
    reader, writer = pipe
    tokenizer = byte_level()
    ids = tokenizer("größer, the captain", add_special_tokens=False)["input_ids"]
    stream = AnswerStream(AnswerWriter(writer), tokenizer, STOP, eos_ids={tokenizer.eos_token_id})
    shown = ""
    for token in ids:
        stream.on_tokens([token])
        shown += read(reader)  # raises if half a character was written
        assert "größer, the cap".startswith(shown)
    stream.finish()
    assert shown == "größer, the cap"
    assert read(reader) == "\n"


def test_the_end_token_is_no_text_even_if_it_has_a_name(pipe):
    reader, writer = pipe
    tokenizer = byte_level()
    the, end = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in ("t", "e"))
    stream = AnswerStream(AnswerWriter(writer), tokenizer, GenerationOptions(), eos_ids={end})
    stream.on_tokens([the])
    stream.on_tokens([end])
    stream.on_tokens([None])
    stream.finish()
    assert read(reader) == "t\n"


def test_without_a_tokenizer_the_answer_is_an_empty_line(pipe):
    reader, writer = pipe
    stream = AnswerStream(AnswerWriter(writer), None, GenerationOptions(), eos_ids=set())
    stream.on_tokens([3])
    stream.finish()
    assert read(reader) == "\n"


def test_a_line_of_json_stays_one_line(pipe):
    reader, writer = pipe
    generation = Generation(
        prompt_tokens=3, new_token_ids=[1, 2], text='a\n"ü', finish_reason="stop", first_token_logits_top5=[]
    )
    AnswerWriter(writer).write_line(7, generation)
    [line] = read(reader).splitlines()
    assert json.loads(line) == {
        "index": 7,
        "text": 'a\n"ü',
        "new_token_ids": [1, 2],
        "finish_reason": "stop",
        "prompt_tokens": 3,
    }


def test_a_reader_who_leaves_is_no_error(pipe):
    reader, writer = pipe
    answers = AnswerWriter(writer)
    answers.write("seen")
    os.close(reader)
    answers.write("not seen")
    answers.write("nor this")


def test_a_full_disk_is_an_error():
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space"):
            AnswerWriter(full).write("text")
    finally:
        os.close(full)
