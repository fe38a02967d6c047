"""Prompts of a run as token ids, read and checked on rank 0."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from launch.inputs.options import Chat, PromptOptions
from launch.inputs.text_files import read_text
from policies.prompt_cache.model_text import render
from policies.reuse import GivenPrompt, ReusingPrompt

E = TypeVar("E")
P = TypeVar("P")

SOURCES = ("text", "file", "ids_file", "random_tokens")


@dataclass(kw_only=True)
class Prompts:
    """Prompts of a run.

    Attributes:
        ids: token ids of each prompt.
        one_text: whether this is a single prompt, whose answer is printed as text.
        reusing: the same prompts with what they reuse, if they reuse anything.
        skipped: for each prompt that cannot be used, by its place among all prompts, what is wrong with it.
    """

    ids: list[list[int]]
    one_text: bool
    reusing: list[ReusingPrompt] | None = None
    skipped: dict[int, str] = field(default_factory=dict)

    @property
    def places(self) -> list[int]:
        """Place of each prompt among all that were given."""
        return [place for place in range(len(self.ids) + len(self.skipped)) if place not in self.skipped]

    def skip(self, check: Callable[[GivenPrompt], None]) -> None:
        """Leave out the prompts for which `check` raises a ValueError.

        Raises:
            ValueError: if none is left.
        """

        def checked(number: int) -> int:
            check(self.asked[number])
            return number

        places = self.places
        left, wrong = usable(range(len(self.ids)), checked, skip_invalid=True)
        self.ids = [self.ids[number] for number in left]
        self.reusing = None if self.reusing is None else [self.reusing[number] for number in left]
        self.skipped |= {places[number]: message for number, message in wrong.items()}

    @property
    def asked(self) -> Sequence[GivenPrompt]:
        """Prompts in the form that the engine takes."""
        return self.ids if self.reusing is None else self.reusing


def read_prompts(options: PromptOptions, *, tokenizer: Any | None, vocab_size: int, seed: int = 0) -> Prompts:
    """Read the prompts that `options` name and tokenize them.

    Raises:
        ValueError: in one line, for a file that cannot be read, is not text or is empty, and for ids outside the
            vocabulary; with `skip_invalid`, only if none of several prompts can be used.
    """
    given = [name for name in SOURCES if getattr(options, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"prompt.{name}" for name in given) or "no prompt"
        raise ValueError(f"{found} given; give one of {', '.join(f'prompt.{name}=' for name in SOURCES)}")
    if options.question is not None and given[0] not in ("text", "file"):
        raise ValueError(f"prompt.question cannot be appended to prompt.{given[0]}; use prompt.text or prompt.file")
    if options.random_tokens is not None:
        draw = random.Random(seed)
        rows = [[draw.randrange(vocab_size) for _ in range(options.random_tokens)] for _ in range(options.batch)]
        return Prompts(ids=rows, one_text=len(rows) == 1)
    if options.ids_file is not None:
        return _prompts_of_ids(options.ids_file, vocab_size, skip_invalid=options.skip_invalid)
    if tokenizer is None:
        raise ValueError(
            f"prompt.{given[0]} needs a tokenizer, and this model has none; "
            "use prompt.ids_file=<json list of token ids>"
        )
    lines = is_jsonl(options.file)

    def ids_of(source: tuple[str, str]) -> list[int]:
        text, name = source
        text = text_of_line(text, options.question, name) if lines else _joined(text, options.question, name=name)
        return tokenize(text, tokenizer, options.chat, name=name)

    ids, skipped = usable(sources(options), ids_of, skip_invalid=options.skip_invalid and lines)
    return Prompts(ids=ids, one_text=not lines, skipped=skipped)


def use_template(tokenizer: Any | None, path: str | None, option: str) -> None:
    """Give a tokenizer the chat template in a file in place of its own; None leaves it as it is.

    Raises:
        ValueError: in one line, if the file cannot be read or is no template, or if there is no tokenizer.
    """
    if path is None:
        return
    name = f"{option}={path}"
    if tokenizer is None:
        raise ValueError(f"{name} needs a tokenizer, and this model has none; leave it out")
    template = read_text(path, name)
    if not template.strip():
        raise ValueError(f"{name} is empty; give a template in Jinja")
    tokenizer.chat_template = template
    try:
        render(tokenizer, [{"role": "user", "content": "text"}], add_generation_prompt=True)
    except ValueError as error:
        raise ValueError(f"{name} fails on a message of a user ({error}); correct the template") from error


def usable(entries: Sequence[E], made: Callable[[E], P], *, skip_invalid: bool) -> tuple[list[P], dict[int, str]]:
    """Prompt that is made of each entry that can be used; for each of the others, by its place, what is wrong with it.

    Raises:
        ValueError: for the first entry that cannot be used; with `skip_invalid`, only if none can.
    """
    found, wrong = [], {}
    for place, entry in enumerate(entries):
        try:
            found.append(made(entry))
        except ValueError as error:
            if not skip_invalid:
                raise
            wrong[place] = str(error)
    if not found:
        raise ValueError(f"none of {len(wrong)} prompts can be used; the first: {next(iter(wrong.values()))}")
    return found, wrong


def tokenize(text: str, tokenizer: Any, chat: Chat, *, name: str) -> list[int]:
    """Tokenize a prompt; with a chat template the text is the user's message.

    Raises:
        ValueError: if there is no token, or if the chat template is missing or fails.
    """
    template = getattr(tokenizer, "chat_template", None)
    if chat is Chat.true and not template:
        raise ValueError("prompt.chat=true, but the model's tokenizer has no chat template; use prompt.chat=false")
    if chat is Chat.false or not template:
        # verbose=False: check_prompts reports a text that is longer than the model's context, with the remedy.
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    else:
        messages = [{"role": "user", "content": text}]
        try:
            rendered = render(tokenizer, messages, add_generation_prompt=True)
        except ValueError as error:
            raise ValueError(f"the model's chat template fails ({error}); use prompt.chat=false") from error
        ids = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise ValueError(f"{name} has no tokens; give a text")
    return [int(token) for token in ids]


def _joined(document: str, question: str | None, *, name: str, question_name: str = "prompt.question") -> str:
    """Append the question to the document, after a blank line."""
    if not document.strip():
        raise ValueError(f"{name} is empty; give a text")
    if question is None:
        return document
    if not question.strip():
        raise ValueError(f"{question_name} is empty; leave it out")
    return document.rstrip("\r\n") + "\n\n" + question


def is_jsonl(path: str | None) -> bool:
    return path is not None and path.lower().endswith(".jsonl")


def sources(options: PromptOptions) -> list[tuple[str, str]]:
    """The text, or each line of a .jsonl file, with its name for messages."""
    if options.text is not None:
        return [(options.text, "prompt.text")]
    assert options.file is not None
    name = f"prompt.file={options.file}"
    text = read_text(options.file, name)
    return _lines(text, name) if is_jsonl(options.file) else [(text, name)]


def _lines(text: str, name: str) -> list[tuple[str, str]]:
    # Only "\n" ends a line: a JSON string may contain other characters at which splitlines() would split it.
    numbered = enumerate(text.split("\n"), start=1)
    lines = [(line, f"{name} line {number}") for number, line in numbered if line.strip()]
    if not lines:
        raise ValueError(f"{name} is empty; give a prompt per line")
    return lines


def text_of_line(line: str, question: str | None, name: str) -> str:
    """The prompt in a line of a .jsonl file, with its question. Raises: ValueError: it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets that are nested too deep
        raise ValueError(f"{name} is not JSON ({error}); give a string or an object with 'prompt'") from error
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ValueError(f"{name} must be a string or an object with a string 'prompt'")
    own_question = entry.get("question", question)
    if own_question is not None and not isinstance(own_question, str):
        raise ValueError(f"{name}: 'question' must be a string")
    try:
        entry["prompt"].encode()
        (own_question or "").encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"{name} holds a character that is not valid Unicode") from error
    question_name = f"{name}: 'question'" if "question" in entry else "prompt.question"
    return _joined(entry["prompt"], own_question, name=name, question_name=question_name)


def _prompts_of_ids(path: str, vocab_size: int, *, skip_invalid: bool) -> Prompts:
    name = f"prompt.ids_file={path}"
    text = read_text(path, name)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON ({error}); give a list of token ids") from error
    if not isinstance(entries, list):
        raise ValueError(f"{name} must be a list of token ids, or a list of such lists")
    are_lists = [isinstance(entry, list) for entry in entries]
    is_list_of_lists = any(are_lists) if skip_invalid else bool(entries) and all(are_lists)

    def ids_of(row: Any) -> list[int]:
        if not isinstance(row, list):
            raise ValueError(f"{name} holds {json.dumps(row)[:40]}, which is no list of token ids")
        if not row:
            raise ValueError(f"{name} holds an empty prompt; a prompt has at least one token")
        for token in row:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ValueError(
                    f"{name} must be a list of token ids, and {json.dumps(token)[:40]} is not a whole number"
                )
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} has token id {str(token)[:40]}, but the model's ids are 0 to {vocab_size - 1}"
                )
        return row

    rows = entries if is_list_of_lists else [entries]
    ids, skipped = usable(rows, ids_of, skip_invalid=skip_invalid and is_list_of_lists)
    return Prompts(ids=ids, one_text=not is_list_of_lists, skipped=skipped)
