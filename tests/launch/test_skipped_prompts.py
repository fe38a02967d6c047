"""prompt.skip_invalid: of several prompts those that cannot be used are told, and the others are answered."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.infer import INFER, main
from launch.inputs.options import PromptOptions, ineffective_settings
from launch.inputs.prompts import Prompts, read_prompts
from launch.outputs.answers import AnswerWriter
from runahead.prefill.prompt_check import PromptLimits, check_prompts
from tests.families import save_tiny_config
from tests.tokenizers_for_tests import byte_level

LINES = [
    '"the ice"',
    "{broken",
    '{"prompt": ""}',
    '"the captain and his sister"',
    '{"question": "who?"}',
    '"\\ud800"',
    '{"prompt": "a ship", "question": "whose?"}',
]
INVALID = {1: "is not JSON", 2: "is empty", 4: "with a string 'prompt'", 5: "not valid Unicode"}


def read(path: Path, text: str, **options: object) -> Prompts:
    path.write_text(text)
    kind = "file" if path.suffix == ".jsonl" else "ids_file"
    prompt = PromptOptions(**{kind: str(path), "skip_invalid": True, **options})
    return read_prompts(prompt, tokenizer=byte_level(), vocab_size=len(byte_level()))


def test_what_is_left_is_what_a_file_without_the_others_holds(tmp_path):
    prompts = read(tmp_path / "all.jsonl", "\n".join(LINES))
    valid = [line for place, line in enumerate(LINES) if place not in INVALID]
    alone = read(tmp_path / "valid.jsonl", "\n".join(valid), skip_invalid=False)
    assert prompts.ids == alone.ids
    assert prompts.places == [0, 3, 6]


def test_each_skipped_prompt_is_named_with_its_line_and_its_fault(tmp_path):
    skipped = read(tmp_path / "all.jsonl", "\n".join(LINES)).skipped
    assert skipped.keys() == INVALID.keys()
    for place, fault in INVALID.items():
        assert f"line {place + 1}" in skipped[place]
        assert fault in skipped[place]
        assert "\n" not in skipped[place]


def test_without_it_the_first_invalid_prompt_is_refused(tmp_path):
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read(tmp_path / "all.jsonl", "\n".join(LINES), skip_invalid=False)


def test_token_ids_are_checked_row_by_row(tmp_path):
    prompts = read(tmp_path / "ids.json", '[[1, 2], [], [3, "x"], "y", [999999], [4]]')
    assert prompts.ids == [[1, 2], [4]]
    assert prompts.places == [0, 5]
    assert ["empty prompt" in prompts.skipped[1], '"x"' in prompts.skipped[2], '"y"' in prompts.skipped[3]] == [
        True
    ] * 3
    assert "999999" in prompts.skipped[4]


def test_a_single_list_of_ids_is_one_prompt_and_is_refused(tmp_path):
    with pytest.raises(ValueError, match='"x" is not a whole number'):
        read(tmp_path / "ids.json", '[1, "x"]')


def checked(*, num_new: int) -> Callable[[list[int]], None]:
    """A run's check of each prompt, with a model of 5 positions."""
    return lambda ids: check_prompts([ids], PromptLimits(max_positions=5), num_new=num_new, names=["the prompt"])


def test_prompts_that_are_too_long_are_skipped_too(tmp_path):
    prompts = read(tmp_path / "ids.json", "[[1], [], [1, 1, 1, 1], [2, 2]]")
    prompts.skip(checked(num_new=2))
    assert prompts.ids == [[1], [2, 2]]
    assert prompts.places == [0, 3]
    assert list(prompts.skipped) == [1, 2]
    assert "the prompt has 4 tokens" in prompts.skipped[2]


def test_where_none_can_be_used_that_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="none of 2 prompts can be used; the first: .* line 1 is not JSON"):
        read(tmp_path / "all.jsonl", "{\n[")
    with pytest.raises(ValueError, match="none of 1 prompts can be used; the first: the prompt has 3 tokens"):
        read(tmp_path / "ids.json", "[[1, 1, 1]]").skip(checked(num_new=9))


def test_a_file_that_cannot_be_read_is_refused_as_ever(tmp_path):
    with pytest.raises(ValueError, match="is empty; give a prompt per line"):
        read(tmp_path / "all.jsonl", "\n\n")


def test_skipped_prompts_have_their_lines_in_order(tmp_path):
    with open(tmp_path / "out", "wb") as out:
        answers = AnswerWriter(out.fileno(), skipped={5: "five", 0: "zero", 2: "two"})
        for place in (1, 4):
            answers.write_skipped(before=place)
            os.write(out.fileno(), b'{"index": %d}\n' % place)
        answers.write_skipped()
    entries = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [entry["index"] for entry in entries] == [0, 1, 2, 4, 5]
    assert [entry.get("error") for entry in entries] == ["zero", None, "two", None, "five"]


def test_it_is_said_where_it_changes_nothing():
    warning = "prompt.skip_invalid has no effect on a single prompt"
    one = INFER.compose(["prompt.text=a", "prompt.skip_invalid=true"])
    assert warning in ineffective_settings(one)
    for several in ("prompt.file=a.jsonl", "prompt.ids_file=a.json"):
        assert warning not in ineffective_settings(INFER.compose([several, "prompt.skip_invalid=true"]))


def test_a_run_answers_the_others_and_reports_all(tmp_path, capfd):
    save_tiny_config(tmp_path, byte_level(), max_position_embeddings=64)
    (tmp_path / "all.jsonl").write_text("\n".join([*LINES, json.dumps("long " * 40)]))
    (tmp_path / "valid.jsonl").write_text("\n".join(LINES[place] for place in (0, 3, 6)))
    options = ["model=random", f"model.config={tmp_path}", "generation.max_new_tokens=5", "prompt.batch=2"]
    assert main([*options, f"prompt.file={tmp_path / 'valid.jsonl'}"]) == 0
    alone = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    report = tmp_path / "run.json"
    everything = [*options, f"prompt.file={tmp_path / 'all.jsonl'}", f"report={report}", "prompt.skip_invalid=true"]
    assert main(everything) == 0
    out, err = capfd.readouterr()
    entries = [json.loads(line) for line in out.splitlines()]
    assert [entry["index"] for entry in entries] == list(range(8))
    answered = [entry for entry in entries if "error" not in entry]
    assert [entry["index"] for entry in answered] == [0, 3, 6]
    assert [entry["new_token_ids"] for entry in answered] == [entry["new_token_ids"] for entry in alone]
    assert "it is longer than the model's 64 positions" in entries[7]["error"]
    assert "skipped           5; the first: " in err
    fields = json.loads(report.read_text())
    assert [prompt["index"] for prompt in fields["prompts"]] == [0, 3, 6]
    assert [prompt["index"] for prompt in fields["skipped"]] == [1, 2, 4, 5, 7]
