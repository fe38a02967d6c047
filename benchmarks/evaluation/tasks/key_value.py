"""Key-value retrieval: one value of a JSON object of random UUIDs, as in Lost in the Middle and InfiniteBench.

Nothing tells one pair from another but its digits, so a policy that does not know the key cannot choose; where the
context can be read in several ways, as prose can, policies differ less (Liu et al., 2023, arXiv 2307.03172; Zhang et
al., 2024, arXiv 2402.13718).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from statistics import mean

from benchmarks.evaluation.contenders import contenders
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.metrics import FOUND
from benchmarks.evaluation.options import EvaluateRun
from benchmarks.evaluation.tasks.answering import AnswerTask, Item
from benchmarks.evaluation.tasks.base import COST_OF_NEW, Case, Runtime
from benchmarks.evaluation.tasks.ruler.needles import uuid
from benchmarks.harness.lines import Line
from launch.program.ending import say

HEAD = "The JSON object below has a value for each of its keys.\n"
ASKED = '\nWhat is the value of the key "{key}"? Copy it from the object.\n"{key}": "'
HALF = "half"
"""Number of keys in a case, if it is searched."""
CLOSE = 1.25
"""Ratio of the two numbers between which a search ends."""


class KeyValue(AnswerTask):
    """Share of answers that begin with the value of the key, all of its digits."""

    metric = FOUND

    def __init__(self, run: EvaluateRun, material: Material) -> None:
        self._options = options = run.key_value
        self.material, self.question = material, options.question
        sizes = [HALF] if options.pairs is None else options.pairs
        self.cases = [{"pairs": pairs, "sample": sample} for sample in range(options.samples) for pairs in sizes]
        self.settings = {"question": options.question.name}
        if options.pairs is None:
            self.settings |= {"search_samples": options.search_samples, "most_tokens": options.most_tokens}
        self._half: int | None = None
        for pairs in options.pairs or [1]:
            num_tokens = self._num_tokens(pairs)
            material.require_positions(f"key_value.pairs={pairs}", num_tokens)

    def prepare(self, runtime: Runtime, done: Sequence[Line]) -> None:
        """Search the number of pairs at which the full cache answers about half, unless earlier lines have it."""
        if self._options.pairs is not None:
            return
        known = [line["details"]["pairs"] for line in done]
        self._half = known[0] if known else self._search(runtime)

    def cost(self, case: Case) -> float:
        tokens = self._options.most_tokens / 4 if case["pairs"] == HALF else self._num_tokens(case["pairs"])
        return tokens + COST_OF_NEW * 16

    def item(self, case: Case) -> Item:
        pairs = self._half if case["pairs"] == HALF else case["pairs"]
        assert pairs is not None, "prepare() comes first"
        return self._item(pairs, str(case["sample"]))

    def score(self, answer: str, item: Item) -> float:
        return float(answer.strip().startswith(item.answers[0]))

    def _item(self, pairs: int, seed: str) -> Item:
        draw = random.Random(f"key_value {pairs} {seed}")
        values = {uuid(draw): uuid(draw) for _ in range(pairs)}
        key = draw.choice(list(values))
        rows = ",\n".join(f"{json.dumps(each)}: {json.dumps(value)}" for each, value in values.items())
        return Item(
            context=self.material.prefix + self.material.ids(f"{HEAD}{{{rows}}}"),
            question=self.material.ids(ASKED.format(key=key)),
            answers=[values[key]],
            reference=values[key],
            new_tokens=0,
            details={"pairs": pairs, "depth": list(values).index(key) / pairs},
        )

    def _num_tokens(self, pairs: int) -> int:
        """Tokens of a sample with so many pairs, answer included."""
        item = self._item(pairs, "length")
        return len(item.context) + len(item.question) + len(self.reference_ids(item))

    def _search(self, runtime: Runtime) -> int:
        [full] = contenders(["full"], [])
        limits = [self._options.most_tokens, self.material.max_positions or self._options.most_tokens]

        def found_share(pairs: int) -> float | None:
            """Share of the questions that the full cache answers; None if so many pairs are too long."""
            if self._num_tokens(pairs) + MARGIN > min(limits):
                return None
            items = [self._item(pairs, f"search {sample}") for sample in range(self._options.search_samples)]
            share = mean(outcome.score for item in items for _, outcome in self.outcomes(runtime, [full], item))
            say(f"key_value: the full cache finds {share:.0%} of the values among {pairs} keys")
            return share

        return half_way(found_share)


MARGIN = 16
"""Tokens by which samples of one size may differ."""


def half_way(found_share: Callable[[int], float | None]) -> int:
    """The number of keys at which about half of the values are found, by doubling and then halving the distance.

    Args:
        found_share: number of keys -> share of the values that are found; None if so many are too long.
    """
    shares: dict[int, float] = {}
    low, high = 1, 2
    while True:
        share = found_share(high)
        if share is None:
            break
        shares[high] = share
        if share < 0.5:
            break
        low, high = high, 2 * high
    while high / low > CLOSE and high - low > 1:
        middle = (low + high) // 2
        share = found_share(middle)
        if share is None or share < 0.5:
            high = middle
        else:
            low = middle
        if share is not None:
            shares[middle] = share
    return min(shares, key=lambda pairs: (abs(shares[pairs] - 0.5), -pairs), default=1)
