"""Prompts are read on one rank, checked before the weights are loaded, and refused in one line."""

import io
import json
import os

import pytest

from launch.inputs.options import PromptOptions
from launch.inputs.prompts import read_prompts, use_template
from runahead.config import PrefillOptions
from runahead.prefill.prompt_check import PromptLimits, check_prompts
from runahead.thinning.rank_policies import RankPolicies
from tests.families import ROPE_THRESHOLD, build
from tests.tokenizers_for_tests import byte_level, sentencepiece

TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


@pytest.fixture
def tokenizer():
    return byte_level()


@pytest.fixture
def chat_tokenizer(monkeypatch):
    tokenizer = byte_level()
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    return tokenizer


def texts_of(options: PromptOptions, tokenizer) -> list[str]:
    prompts = read_prompts(options, tokenizer=tokenizer, vocab_size=len(tokenizer))
    return [tokenizer.decode(ids) for ids in prompts.ids]


def refusal(options: PromptOptions, tokenizer=None, vocab_size: int = 100) -> str:
    with pytest.raises(ValueError) as error:
        read_prompts(options, tokenizer=tokenizer, vocab_size=vocab_size)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_text_is_tokenized_as_it_is(tokenizer):
    text = " a = [b],\n\n'c' größer\t"
    prompts = read_prompts(PromptOptions(text=text), tokenizer=tokenizer, vocab_size=len(tokenizer))
    assert prompts.one_text
    assert tokenizer.decode(prompts.ids[0]) == text


def test_plain_text_gets_what_the_tokenizer_adds(monkeypatch):
    tokenizer = sentencepiece()
    read = read_prompts(PromptOptions(text="the"), tokenizer=tokenizer, vocab_size=len(tokenizer)).ids[0]
    assert read == tokenizer("the")["input_ids"]


def test_question_follows_the_document_after_a_blank_line(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("document\n\n")
    options = PromptOptions(file=str(tmp_path / "a.txt"), question=" why? ")
    assert texts_of(options, tokenizer) == ["document\n\n why? "]
    assert texts_of(PromptOptions(text="document", question="why?"), tokenizer) == ["document\n\nwhy?"]


def test_file_is_utf8_with_or_without_byte_order_mark(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffgrößer\r\n".encode())
    assert texts_of(PromptOptions(file=str(tmp_path / "a.txt")), tokenizer) == ["größer\r\n"]


def test_dash_is_standard_input(tokenizer, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("größer".encode())))
    assert texts_of(PromptOptions(file="-"), tokenizer) == ["größer"]


def test_a_closed_standard_input_is_told(tokenizer, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # as Python has it after <&-
    with pytest.raises(ValueError, match=r"^prompt.file=- cannot be read: standard input is closed; name a file"):
        texts_of(PromptOptions(file="-"), tokenizer)


def test_jsonl_has_a_prompt_per_line(tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = ['"one\\u2028line"', "", '{"prompt": "document", "question": "why?"}', ' {"prompt": "three", "id": 7}\r']
    path.write_text("\n".join(lines))
    prompts = read_prompts(PromptOptions(file=str(path)), tokenizer=tokenizer, vocab_size=len(tokenizer))
    assert not prompts.one_text
    assert [tokenizer.decode(ids) for ids in prompts.ids] == ["one\u2028line", "document\n\nwhy?", "three"]


def test_a_line_without_question_gets_that_of_the_command_line(tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a"\n{"prompt": "b", "question": "own?"}\n')
    assert texts_of(PromptOptions(file=str(path), question="all?"), tokenizer) == ["a\n\nall?", "b\n\nown?"]


def test_chat_template_makes_the_text_the_users_message(chat_tokenizer):
    expected = "<bos>user: the document\n\nwhy?<|end|><bos>assistant:"
    for chat in ("auto", "true"):
        options = PromptOptions(text="the document", question="why?", chat=chat)
        assert texts_of(options, chat_tokenizer) == [expected]
    assert texts_of(PromptOptions(text="the", chat="false"), chat_tokenizer) == ["the"]


def test_chat_without_a_template(tokenizer):
    assert texts_of(PromptOptions(text="the", chat="auto"), tokenizer) == ["the"]
    assert "no chat template; use prompt.chat=false" in refusal(PromptOptions(text="the", chat="true"), tokenizer)


def test_a_failing_template_is_told(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('only system\nmessages') }}")
    assert "only system" in refusal(PromptOptions(text="the"), tokenizer)


def test_ids_are_taken_as_they_are_without_a_tokenizer(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("[3, 0, 99]")
    prompts = read_prompts(PromptOptions(ids_file=str(path)), tokenizer=None, vocab_size=100)
    assert (prompts.ids, prompts.one_text) == ([[3, 0, 99]], True)
    path.write_text("[[3], [0, 99]]")
    prompts = read_prompts(PromptOptions(ids_file=str(path)), tokenizer=None, vocab_size=100)
    assert (prompts.ids, prompts.one_text) == ([[3], [0, 99]], False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[3, 100]", "has token id 100, but the model's ids are 0 to 99"),
        ("[-1]", "has token id -1"),
        ("[1.5]", "1.5 is not a whole number"),
        ("[true]", "true is not a whole number"),
        ("[1, [2]]", "[2] is not a whole number"),
        ("[]", "empty prompt"),
        ("[[1], []]", "empty prompt"),
        ('{"a": 1}', "must be a list"),
        ("3", "must be a list"),
        ("[1,", "is not JSON"),
        ("", "is not JSON"),
    ],
)
def test_wrong_ids_are_refused(tmp_path, content, message):
    (tmp_path / "ids.json").write_text(content)
    assert message in refusal(PromptOptions(ids_file=str(tmp_path / "ids.json")))


def test_random_tokens_are_the_same_for_the_same_seed():
    def draw(seed: int, batch: int = 1) -> list[list[int]]:
        options = PromptOptions(random_tokens=50, batch=batch)
        return read_prompts(options, tokenizer=None, vocab_size=10, seed=seed).ids

    assert draw(1) == draw(1) != draw(2)
    assert [len(ids) for ids in draw(1, batch=3)] == [50, 50, 50]
    assert set(draw(1)[0]) == set(range(10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PromptOptions(), "no prompt given"),
        (PromptOptions(question="why?"), "no prompt given"),
        (PromptOptions(text="a", file="b"), "prompt.text and prompt.file given"),
        (PromptOptions(ids_file="a", question="b"), "prompt.question cannot be appended to prompt.ids_file"),
        (PromptOptions(text=""), "prompt.text is empty"),
        (PromptOptions(text=" \n"), "prompt.text is empty"),
        (PromptOptions(text="a", question=""), "prompt.question is empty"),
    ],
)
def test_wrong_options_are_refused(options, message, tokenizer):
    assert message in refusal(options, tokenizer)


def test_text_without_a_tokenizer_names_the_way_out():
    assert "use prompt.ids_file=" in refusal(PromptOptions(text="a"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"text\0text", "is a binary file"),
        (b"text\xff", "is not UTF-8 (byte 4)"),
    ],
)
@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_files_that_are_no_text_are_refused(tmp_path, tokenizer, content, message, ending):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)
    told = refusal(PromptOptions(file=str(path)), tokenizer)
    assert message in told
    assert str(path) in told


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is not JSON"),
        ("3", "line 3 must be a string or an object"),
        ('{"question": "why?"}', "line 3 must be a string or an object"),
        ('{"prompt": 3}', "line 3 must be a string or an object"),
        ('{"prompt": "a", "question": 3}', "line 3: 'question' must be a string"),
        ('{"prompt": "a", "question": "\\u2028"}', "line 3: 'question' is empty; leave it out"),
        ('""', "line 3 is empty"),
        ('"\\ud800"', "line 3 holds a character that is not valid Unicode"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, tokenizer, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'"good"\n\n{line}\n')
    assert message in refusal(PromptOptions(file=str(path)), tokenizer)


def test_paths_that_cannot_be_read_are_refused(tmp_path, tokenizer):
    assert "does not exist" in refusal(PromptOptions(file=str(tmp_path / "no")), tokenizer)
    assert "is a folder" in refusal(PromptOptions(file=str(tmp_path)), tokenizer)
    assert "is empty; name a file" in refusal(PromptOptions(file=""), tokenizer)
    assert "cannot be read" in refusal(PromptOptions(file=str(tmp_path / ("n" * 300))), tokenizer)
    assert "does not exist" in refusal(PromptOptions(ids_file=str(tmp_path / "no")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root passes permission bits")
def test_an_unreadable_file_is_refused(tmp_path, tokenizer):
    (tmp_path / "a").write_text("text")
    (tmp_path / "a").chmod(0)
    assert "cannot be read: Permission denied" in refusal(PromptOptions(file=str(tmp_path / "a")), tokenizer)


def test_prompt_and_new_tokens_must_fit_the_model():
    limits = PromptLimits(max_positions=100)
    check_prompts([[1] * 90], limits, num_new=10)
    check_prompts([[1] * 900], PromptLimits(), num_new=10)
    with pytest.raises(ValueError) as error:
        check_prompts([[1], [1] * 91], limits, num_new=10, names=["prompt 1", "prompt 2"])
    for part in ("prompt 2", "91 tokens", "max_new_tokens=10", "100 positions", "max_new_tokens=9 or less"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="use a shorter prompt"):
        check_prompts([[1] * 100], limits, num_new=10)


def test_a_config_tells_which_answers_cross_the_longrope_threshold():
    limits = PromptLimits.of_config(build("phi3_longrope").config, RankPolicies(), PrefillOptions(), 1)
    for length, num_new, crosses in (
        (38, 3, False),
        (38, 4, True),
        (ROPE_THRESHOLD, 1, False),
        (ROPE_THRESHOLD, 2, True),
    ):
        assert limits.outgrows(length, num_new) == crosses
    assert not limits.outgrows(ROPE_THRESHOLD + 1, 50) and not PromptLimits().outgrows(38, 50)


def test_a_template_in_a_file_takes_the_place_of_the_models(tmp_path, chat_tokenizer):
    path = tmp_path / "own.jinja"
    path.write_text("{% for message in messages %}<|end|>{{ message['content'] }}{% endfor %}")
    use_template(chat_tokenizer, None, "prompt.chat_template")
    assert texts_of(PromptOptions(text="the ice"), chat_tokenizer) == ["<bos>user: the ice<|end|><bos>assistant:"]
    use_template(chat_tokenizer, str(path), "prompt.chat_template")
    assert texts_of(PromptOptions(text="the ice"), chat_tokenizer) == ["<|end|>the ice"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; give a template"),
        ("{% for message in messages %}", "fails on a message of a user"),
        ("{{ raise_exception('no users here') }}", "no users here"),
        (None, "does not exist"),
    ],
)
def test_a_template_that_cannot_be_used_is_named(tmp_path, chat_tokenizer, content, message):
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as error:
        use_template(chat_tokenizer, str(path), "prompt.chat_template")
    assert f"prompt.chat_template={path}" in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        use_template(None, str(path), "prompt.chat_template")


def test_everything_read_can_be_sent_to_other_ranks(tmp_path):
    # The ids of a list in a JSON file are plain ints: what agree() pickles must not drag a tokenizer along.
    path = tmp_path / "ids.json"
    path.write_text("[1]")
    prompts = read_prompts(PromptOptions(ids_file=str(path)), tokenizer=None, vocab_size=5)
    assert json.loads(json.dumps(prompts.ids)) == prompts.ids
