"""A prompt of one of RULER's tasks, and how it is made as long as it may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.evaluation.material import Material


@dataclass(frozen=True, kw_only=True)
class RulerPrompt:
    """A question about a context, as text.

    Attributes:
        question: ends where the answer begins.
        answers: strings of which a right answer holds all, or one if `any_answer`.
        reference: a right answer, as the model would word it.
    """

    context: str
    question: str
    answers: Sequence[str]
    reference: str
    any_answer: bool = False


class NoRoomError(ValueError):
    """A prompt of the smallest size has more tokens than it may have."""


def longest(
    build: Callable[[int], RulerPrompt], room: int, material: Material, *, least: int = 1, most: int
) -> RulerPrompt:
    """The prompt of the largest size whose context and question have at most `room` tokens.

    Args:
        build: size (such as a number of sentences) -> the prompt; a larger one is longer.
        least, most: smallest and largest size.

    Raises:
        NoRoomError: the prompt of the smallest size is longer.
    """

    def fits(size: int) -> bool:
        prompt = build(size)
        return len(material.ids(prompt.context)) + len(material.ids(prompt.question)) <= room

    if not fits(least):
        raise NoRoomError
    low, high = least, min(most, 2 * least)
    while high < most and fits(high):
        low, high = high, min(most, 2 * high)
    if fits(high):
        return build(high)
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return build(low)


def listed(words: Sequence[str]) -> str:
    """Words as in a sentence: "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
