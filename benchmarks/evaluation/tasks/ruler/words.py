"""RULER's aggregation tasks: the ten words that a list repeats most (cwe), and the most frequent coded words (fwe)."""

from __future__ import annotations

import math
import random
from string import ascii_lowercase

from benchmarks.evaluation.material import Material
from benchmarks.evaluation.tasks.ruler.base import RulerPrompt, longest
from benchmarks.evaluation.tasks.ruler.vocabulary import words_of

LONG = 4000
"""Length in tokens from which words are repeated as often as published for 4,096 and more; without special tokens."""
NUM_COMMON = 10
COMMON_HEAD = "Some words of the numbered list below are there more often than others. Remember these.\n"
COMMON_ASKED = (
    f"\nQuestion: Which {NUM_COMMON} words are most frequent in the list above?\n"
    f"Answer: The {NUM_COMMON} words that are most frequent in the list are:"
)
CODED_LETTERS = 6
TOKENS_PER_CODED_WORD = 50
"""Tokens of the prompt per word of the vocabulary."""
ALPHA = 2.0
"""Exponent of the words' frequencies."""
ZETA = math.pi**2 / 6
"""The Riemann zeta function at ALPHA."""
LEAST_CODED = 80
"""Size of a text from which on no two of the most frequent words are equally frequent."""
NUM_FREQUENT = 3
NOISE = "..."
CODED_HEAD = "Count how often each coded word is in the coded text below.\n"
CODED_ASKED = (
    f"\nQuestion: Which {NUM_FREQUENT} words are most frequent in the coded text above? Do not count the dots and give "
    f"no explanation.\nAnswer: The {NUM_FREQUENT} most frequent words of the coded text are:"
)


def common_words(draw: random.Random, room: int, material: Material) -> RulerPrompt:
    """cwe: ten words 30 times each among others three times each, after a solved example; fewer in short contexts."""
    is_long = room >= LONG
    common_times, other_times = (30, 3) if is_long else (6, 1)
    example_words, example_times, example_others = (40, 10, 3) if is_long else (20, 3, 1)
    known = words_of(material)
    draw.shuffle(known)
    example = _numbered(draw, known[:example_words], example_times, example_others)
    solved = f"{example.context}{example.question}{example.reference}\n\n"
    rest, order_seed = known[example_words:], draw.random()

    def build(size: int) -> RulerPrompt:
        task = _numbered(random.Random(order_seed), rest[:size], common_times, other_times)
        return RulerPrompt(
            context=solved + task.context, question=task.question, answers=task.answers, reference=task.reference
        )

    found = longest(build, room, material, least=NUM_COMMON + 1, most=len(rest))
    if found.context == build(len(rest)).context:
        assert material.text is not None
        raise ValueError(
            f"{material.text.name} has {len(known):,} different words, too few for cwe with {room:,} tokens; give a "
            "longer text.file or a smaller length"
        )
    return found


def _numbered(draw: random.Random, words: list[str], common_times: int, other_times: int) -> RulerPrompt:
    """A numbered list, in which the first words are more frequent than the others."""
    common = words[:NUM_COMMON]
    listed = common * common_times + words[NUM_COMMON:] * other_times
    draw.shuffle(listed)
    return RulerPrompt(
        context=COMMON_HEAD + _numbers(listed),
        question=COMMON_ASKED,
        answers=common,
        reference=" " + _numbers(common),
    )


def _numbers(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(draw: random.Random, room: int, material: Material) -> RulerPrompt:
    """fwe: coded words with frequencies that fall as rank^-ALPHA; the first is noise, and the next three are asked."""
    vocabulary = [NOISE]
    while len(vocabulary) < max(room // TOKENS_PER_CODED_WORD, NUM_FREQUENT + 2):
        word = "".join(draw.choices(ascii_lowercase, k=CODED_LETTERS))
        if word not in vocabulary:
            vocabulary.append(word)
    order_seed = draw.random()
    answers = vocabulary[1 : NUM_FREQUENT + 1]

    def build(size: int) -> RulerPrompt:
        # The shares of all ranks add up to less than 1, as those of infinitely many ranks add up to 1.
        counts = [int(size * rank**-ALPHA / ZETA) for rank in range(1, len(vocabulary) + 1)]
        coded = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
        random.Random(order_seed).shuffle(coded)
        return RulerPrompt(
            context=CODED_HEAD + " ".join(coded),
            question=CODED_ASKED,
            answers=answers,
            reference=" " + ", ".join(answers) + ".",
        )

    return longest(build, room, material, least=LEAST_CODED, most=2 * room)
