"""RULER's variable tracking (vt): a chain of five assignments in repeated noise; which variables have the value?"""

from __future__ import annotations

import random
from itertools import pairwise
from string import ascii_uppercase

from benchmarks.evaluation.material import Material
from benchmarks.evaluation.tasks.retrieval import FILLER
from benchmarks.evaluation.tasks.ruler.base import RulerPrompt, longest

HOPS = 4
LETTERS, LETTERS_OF_EXAMPLE = 5, 3
"""Letters of a variable's name, and in the solved example that comes first, as published."""
NOISE_OF_EXAMPLE = 5
HEAD = "Variables are assigned in the text below. Follow the chain of assignments.\n\n"
ASKED = (
    "\nQuestion: Which variables in the text above have the value {value}?\n"
    "Answer: By the chain of assignments in the text above {number} variables have the value {value}:"
)


def prompt(draw: random.Random, room: int, material: Material) -> RulerPrompt:
    """A chain of `HOPS` + 1 variables, after a solved example."""
    example = _task(draw, LETTERS_OF_EXAMPLE, NOISE_OF_EXAMPLE, draw.random())
    solved = f"{example.context}{example.question}{example.reference}\n\n"
    names_seed, place_seed = draw.random(), draw.random()

    def build(size: int) -> RulerPrompt:
        task = _task(random.Random(names_seed), LETTERS, size, place_seed)
        return RulerPrompt(
            context=solved + task.context, question=task.question, answers=task.answers, reference=task.reference
        )

    return longest(build, room, material, least=HOPS + 1, most=room)


def _task(draw: random.Random, letters: int, noise: int, place_seed: float) -> RulerPrompt:
    """A chain in so many repetitions of the noise."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(draw.choices(ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(draw.randrange(10**4, 10**5))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old}" for old, new in pairwise(names)]
    lines = [" ".join(FILLER)] * noise
    places = sorted(random.Random(place_seed).sample(range(noise + 1), len(chain)))
    for place, assignment in zip(reversed(places), reversed(chain), strict=True):
        lines.insert(place, assignment)
    return RulerPrompt(
        context=HEAD + "\n".join(lines),
        question=ASKED.format(value=value, number=len(names)),
        answers=names,
        reference=" " + " ".join(names),
    )
