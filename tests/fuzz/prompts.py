"""Prompt files: a text, a prompt per line, token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from launch.inputs.options import PromptOptions
from launch.inputs.prompts import Prompts, read_prompts
from runahead.prefill.prompt_check import PromptLimits, check_prompts
from tests.fuzz.harness import Outcome, judged
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.fuzz.target import Target
from tests.tokenizers_for_tests import byte_level

VOCAB_SIZE = 330

TEXTS = (
    "The letters of the captain to his sister.\n\nHe writes from the ice, größer als zuvor, 中文字.\n".encode(),
    b"a",
    b"one line\r\nand another\r\n",
    "a text in UTF-8\n".encode("utf-8-sig"),
)
ENTRIES = ("a text", {"prompt": "a text", "question": "who?"}, {"prompt": "größer"}, "\n")
LINES = tuple(
    "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()
    for entries in (ENTRIES, ENTRIES[:1], [*ENTRIES] * 3, ['"', "[", {"prompt": "x" * 300}])
)
IDS = ([1, 2, 3], [[1, 2], [3], [4, 5, 6]], [[0]], list(range(VOCAB_SIZE)))


@dataclass(frozen=True)
class PromptFile:
    """A file's content, and whether invalid prompts are skipped."""

    content: bytes
    skip_invalid: bool = False


def check_prompt_file(given: PromptFile, folder: Path, *, name: str) -> Outcome:
    path = folder / name
    path.write_bytes(given.content)
    source = {"ids_file" if name.endswith(".json") else "file": str(path)}
    options = PromptOptions(**source, skip_invalid=given.skip_invalid)

    def read() -> Prompts:
        return read_prompts(options, tokenizer=byte_level(), vocab_size=VOCAB_SIZE)

    def use(prompts: Prompts) -> None:
        assert prompts.ids and all(prompts.ids)
        assert all(type(token) is int and 0 <= token < VOCAB_SIZE for ids in prompts.ids for token in ids)
        assert len(prompts.places) == len(prompts.ids)
        assert all(line and "\n" not in line for line in prompts.skipped.values())
        json.dumps([prompts.ids, prompts.skipped])
        check_prompts(prompts.ids, PromptLimits(), num_new=4)

    return judged(read, use, names=[str(path)], folder=folder)


def _checked_as(name: str) -> Callable[[PromptFile, Path], Outcome]:
    return lambda given, folder: check_prompt_file(given, folder, name=name)


READER = "launch/inputs/prompts.py read_prompts"

TARGETS = (
    Target(
        name="prompt files, text",
        reads=READER,
        inputs=st.builds(PromptFile, changed_bytes(TEXTS)),
        check=_checked_as("a.txt"),
        share=8,
    ),
    Target(
        name="prompt files, a prompt per line",
        reads=READER,
        inputs=st.builds(
            PromptFile,
            changed_bytes(LINES)
            | st.lists(changed_json(ENTRIES), max_size=4).map(lambda lines: b"".join(b + b"\n" for b in lines)),
            st.booleans(),
        ),
        check=_checked_as("a.jsonl"),
        share=12,
    ),
    Target(
        name="ids files",
        reads=READER,
        inputs=st.builds(
            PromptFile, changed_bytes([json.dumps(ids).encode() for ids in IDS]) | changed_json(IDS), st.booleans()
        ),
        check=_checked_as("a.json"),
        share=10,
    ),
)
