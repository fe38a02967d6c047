"""A row's text grows without being taken back, and ends before the stop string that is complete first."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runahead.decoding.stop_strings import REPLACEMENT, Detokenizer, StopStrings
from tests.tokenizers_for_tests import KINDS, byte_level, sentencepiece

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT))


class Pieces:
    """A tokenizer whose token i is the i-th of the given pieces of text."""

    all_special_tokens: Sequence[str] = ()
    all_special_ids: Sequence[int] = ()

    def __init__(self, pieces: list[str]):
        self.pieces = pieces

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(self.pieces[i] for i in ids)


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def pieces_of(tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@example(text=" the  the\n\n the ")
@example(text="größer 👩‍👩‍👧 中文")
@example(text="   ")
def test_pieces_add_up_to_the_decoded_text(kind, text):
    tokenizer = KINDS[kind]()
    ids = ids_of(tokenizer, text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_of_several_tokens_comes_with_the_last_of_them(kind):
    tokenizer = KINDS[kind]()
    ids = ids_of(tokenizer, "👩")
    ids = ids[-4:]  # its bytes; SentencePiece has a blank before
    assert pieces_of(tokenizer, ids) == ["", "", "", "👩", ""]


def test_blanks_between_sentencepiece_words_are_kept():
    tokenizer = sentencepiece()
    assert pieces_of(tokenizer, ids_of(tokenizer, "the the")) == ["the", " the", ""]


def test_a_special_token_between_words_keeps_the_blank():
    tokenizer = sentencepiece()
    [the] = ids_of(tokenizer, "the")
    assert "".join(pieces_of(tokenizer, [the, tokenizer.eos_token_id, the])) == "the the"


def test_lone_bytes_become_replacement_characters_when_nothing_follows():
    tokenizer = byte_level()
    first_byte_only = ids_of(tokenizer, "👩")[:1]
    assert pieces_of(tokenizer, [*ids_of(tokenizer, "a"), *first_byte_only]) == ["a", "", REPLACEMENT]


@given(st.lists(st.integers(0, 300), max_size=80))
def test_any_token_ids_give_text_without_holding_it_for_ever(ids):
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    for token in ids:
        detokenizer.add(token)
        assert len(detokenizer._window) <= 70
    row = StopStrings(tokenizer)
    taken = ""
    for token in ids:
        row.add(token)
        taken += row.take()
        assert row.text == taken  # without stop strings nothing is held back but half characters
    row.finish()
    assert row.text == taken + row.take()


def test_text_after_broken_bytes_is_not_lost():
    tokenizer = byte_level()
    lone = ids_of(tokenizer, "👩")[0]
    ids = [lone] * 6 + ids_of(tokenizer, "中")
    assert "".join(pieces_of(tokenizer, ids)) == REPLACEMENT * 6 + "中"


LETTERS = st.text("abc", max_size=4)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def cut_at_first_complete(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition, by trying every end of every stop string."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(pieces=st.lists(LETTERS, max_size=12), stops=STOPS)
@example(pieces=["a", "b", "c"], stops=["bc"])
@example(pieces=["ab", "ab", "c"], stops=["abc"])
@example(pieces=["abca"], stops=["c", "bca"])
def test_stop_strings_are_found_however_they_are_split(pieces, stops):
    row = StopStrings(Pieces(pieces), stops)
    taken = ""
    for token in range(len(pieces)):
        stopped = row.add(token)
        taken += row.take()
        expected, is_stopped = cut_at_first_complete("".join(pieces[: token + 1]), stops)
        assert (row.text, stopped) == (expected, is_stopped)
        assert row.text.startswith(taken)
        if stopped:
            assert taken == expected
    row.finish()
    taken += row.take()
    assert taken == row.text == cut_at_first_complete("".join(pieces), stops)[0]


@given(pieces=st.lists(LETTERS, max_size=12), stops=STOPS)
def test_only_what_could_begin_a_stop_string_is_held_back(pieces, stops):
    row = StopStrings(Pieces(pieces), stops)
    taken = ""
    for token in range(len(pieces)):
        if row.add(token):
            break
        taken += row.take()
        held = row.text[len(taken) :]
        begins = any(stop.startswith(held) for stop in stops)
        assert begins and held not in stops


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_across_tokens_of_a_real_tokenizer(kind):
    tokenizer = KINDS[kind]()
    row = StopStrings(tokenizer, ["captain to", "中文"])
    for token in ids_of(tokenizer, "the letters of the captain to his sister"):
        if row.add(token):
            break
    assert row.stopped
    assert row.text == row.take() == "the letters of the "


def test_tokens_after_the_stop_are_ignored():
    row = StopStrings(Pieces(["a", "STOP", "b"]), ["STOP"])
    assert [row.add(0), row.add(1), row.add(2)] == [False, True, True]
    row.finish()
    assert row.text == "a"


def test_the_name_of_a_special_token_stops_though_text_does_not_show_it():
    tokenizer = byte_level()
    row = StopStrings(tokenizer, ["<|end|>"])
    for token in ids_of(tokenizer, "the ice"):
        assert not row.add(token)
    assert row.add(tokenizer.convert_tokens_to_ids("<|end|>"))
    assert row.text == "the ice"


@pytest.mark.parametrize("kind", KINDS)
def test_kept_special_tokens_are_text_by_their_names_and_others_are_not(kind):
    tokenizer = KINDS[kind]()
    end, eos = (tokenizer.convert_tokens_to_ids(name) for name in ("<|end|>", "<eos>"))
    words = ids_of(tokenizer, "the ice")
    row = StopStrings(tokenizer, kept=["<|end|>", "<no token>"])
    taken = ""
    for token in [end, *words, eos, end, *words]:
        row.add(token)
        taken += row.take()
    row.finish()
    assert row.text == taken + row.take() == "<|end|>the ice<|end|>the ice"
    row = StopStrings(tokenizer, ["d|>"], kept=["<|end|>"])  # which is text, so it may end a row
    assert [row.add(token) for token in [*words, end]] == [False] * len(words) + [True]
    assert row.text == "the ice<|en"


def test_without_a_tokenizer_text_is_empty_and_stop_strings_are_refused():
    row = StopStrings(None)
    assert not row.add(3)
    row.finish()
    assert row.text == row.take() == ""
    with pytest.raises(ValueError, match="needs a tokenizer"):
        StopStrings(None, ["x"])
