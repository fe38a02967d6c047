"""RULER's thirteen tasks (Hsieh et al., 2024, arXiv 2404.06654), made after the published definitions.

The numbers of needles, hops, words and repetitions are those of the paper and of its authors' settings; all sentences
are our own. To add a task: a function that makes prompts, an entry in PROMPTS, and its name in options.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.evaluation.material import Material
from benchmarks.evaluation.tasks.ruler import tracing, words
from benchmarks.evaluation.tasks.ruler.base import RulerPrompt
from benchmarks.evaluation.tasks.ruler.needles import Haystack, Needles

MakePrompt = Callable[[random.Random, int, Material], RulerPrompt]
"""Source of randomness, most tokens, and the text -> a prompt."""

PROMPTS: dict[str, MakePrompt] = {
    "niah_single_1": Needles(haystack=Haystack.noise).prompt,
    "niah_single_2": Needles(haystack=Haystack.prose).prompt,
    "niah_single_3": Needles(haystack=Haystack.prose, uuid_values=True).prompt,
    "niah_multikey_1": Needles(haystack=Haystack.prose, keys=4).prompt,
    "niah_multikey_2": Needles(haystack=Haystack.needles).prompt,
    "niah_multikey_3": Needles(haystack=Haystack.needles, uuid_keys=True, uuid_values=True).prompt,
    "niah_multivalue": Needles(haystack=Haystack.prose, values=4).prompt,
    "niah_multiquery": Needles(haystack=Haystack.prose, keys=4, asked=4).prompt,
    "vt": tracing.prompt,
    "cwe": words.common_words,
    "fwe": words.frequent_words,
}
"""Tasks by name, but for those that read a file of questions (`documents.py`)."""

NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
"""Most tokens of an answer, as published, where they are not `NEW_TOKENS_OF_NEEDLES`."""
NEW_TOKENS_OF_NEEDLES = 128
