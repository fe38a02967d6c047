"""RULER's eight retrieval tasks: needles, which say the value of a key, in a haystack of noise, prose or other needles.

Keys are two words or a UUID, values are numbers of seven digits or UUIDs, as published; sentences are our own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from uuid import UUID

from benchmarks.evaluation.material import Material
from benchmarks.evaluation.tasks.retrieval import FILLER
from benchmarks.evaluation.tasks.ruler.base import RulerPrompt, listed, longest
from benchmarks.evaluation.tasks.ruler.vocabulary import KEYS

DEPTHS = 40
"""Number of evenly spaced places in prose, at which needles may be."""
HEAD = "The text below tells secret {kind}s here and there. Remember them; there will be a question about them.\n"
NEEDLE = "A secret {kind} of {key} is {value}."
ONE = "\nQuestion: What is the secret {kind} of {keys} in the text?\nAnswer: The secret {kind} of {keys} in the text is"
SEVERAL = (
    "\nQuestion: What are all the secret {kind}s of {keys} in the text?\n"
    "Answer: The secret {kind}s of {keys} in the text are"
)


class Haystack(Enum):
    """The text around the needles: sentences of noise that repeat, the user's text, or needles with other keys."""

    noise = "noise"
    prose = "prose"
    needles = "needles"


@dataclass(frozen=True, kw_only=True)
class Needles:
    """One of the tasks.

    Attributes:
        uuid_keys, uuid_values: UUIDs in place of words and numbers.
        keys: keys with needles, besides those of the haystack.
        values: needles per key.
        asked: number of keys in the question.
    """

    haystack: Haystack
    uuid_keys: bool = False
    uuid_values: bool = False
    keys: int = 1
    values: int = 1
    asked: int = 1

    def prompt(self, draw: random.Random, room: int, material: Material) -> RulerPrompt:
        seed, kind = draw.random(), "code" if self.uuid_values else "number"
        keys: list[str] = []
        while len(keys) < self.keys:
            key = self._key(draw)
            if key not in keys:
                keys.append(key)
        values = [[self._value(draw) for _ in range(self.values)] for _ in keys]
        needles = [self._needle(key, value) for key, of_key in zip(keys, values, strict=True) for value in of_key]
        draw.shuffle(needles)
        asked = draw.sample(range(self.keys), self.asked)
        answers = [value for at in asked for value in values[at]]
        words = {"kind": kind, "keys": listed([keys[at] for at in asked])}
        question = (ONE if len(answers) == 1 else SEVERAL).format(**words)

        def build(size: int) -> RulerPrompt:
            again = random.Random(seed)  # the same needles among more sentences
            text = self._among(needles, keys, size, again, material)
            context = HEAD.format(kind=kind) + text
            return RulerPrompt(context=context, question=question, answers=answers, reference=f" {listed(answers)}.")

        return longest(build, room, material, least=len(needles), most=room)

    def _among(self, needles: list[str], keys: list[str], size: int, draw: random.Random, material: Material) -> str:
        """The needles among `size` other sentences."""
        if self.haystack is Haystack.prose:
            sentences = material.sentences
            start = draw.randrange(len(sentences))
            hay = [sentences[(start + at) % len(sentences)] for at in range(size)]
            places = [size * depth // (DEPTHS - 1) for depth in sorted(draw.sample(range(DEPTHS), len(needles)))]
            joint = " "
        else:
            places = sorted(draw.sample(range(size + 1), len(needles)))
            hay, joint = [" ".join(FILLER)] * size, "\n"
            if self.haystack is Haystack.needles:
                hay = [self._needle(self._other_key(keys, draw), self._value(draw)) for _ in range(size)]
        for place, needle in zip(reversed(places), reversed(needles), strict=True):
            hay.insert(place, needle)
        return joint.join(hay)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind="code" if self.uuid_values else "number", key=key, value=value)

    def _other_key(self, keys: list[str], draw: random.Random) -> str:
        key = self._key(draw)
        while key in keys:
            key = self._key(draw)
        return key

    def _key(self, draw: random.Random) -> str:
        return uuid(draw) if self.uuid_keys else draw.choice(KEYS)

    def _value(self, draw: random.Random) -> str:
        return uuid(draw) if self.uuid_values else str(draw.randrange(10**6, 10**7))


def uuid(draw: random.Random) -> str:
    """A random UUID (version 4)."""
    return str(UUID(int=draw.getrandbits(128), version=4))
