"""Rank 0's knowledge of the texts that the last stage stores, and how much of waiting requests is among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from policies.base import GivenPrompt, ids_of
from runahead.reuse.prefix_tree import Change, PrefixTree
from runahead.serving.request import Request


class KnownTexts:
    """The texts that the last stage has reported to store.

    What is stored of a request's prompts is looked up once per change of the texts, and what two requests have in
    common only once, since a queue asks for both whenever anything is reported.

    Args:
        least_new: last tokens of a prompt that are always computed.
        step: as of `Prefixes`.
    """

    def __init__(self, least_new: int = 1, step: int = 1) -> None:
        self._texts, self._num_changes, self._least_new, self._step = PrefixTree(math.inf), 0, least_new, step
        self._found: WeakKeyDictionary[Request, tuple[int, list[int]]] = WeakKeyDictionary()
        self._common: WeakKeyDictionary[Request, WeakKeyDictionary[Request, list[int]]] = WeakKeyDictionary()

    @property
    def num_tokens(self) -> int:
        """Stored tokens, of what several texts begin with once."""
        return sum(len(node.ids) for node in self._texts.nodes())

    def apply(self, change: Change) -> None:
        """Do what the last stage has done."""
        self._texts.apply(change)
        self._num_changes += 1

    def found(self, request: Request, key: str) -> list[int]:
        """Tokens of each of a request's different prompts that need not be computed; its last ones always are.

        Args:
            key: of the model's texts.
        """
        looked_up, found = self._found.get(request, (-1, []))
        if looked_up != self._num_changes:
            found = [self._texts.num_stored(ids_of(prompt), key) for prompt in request.different]
            self._found[request] = self._num_changes, found
        return self._but_last(found, request.different)

    def found_after(self, request: Request, others: Iterable[Request], key: str) -> list[int]:
        """As `found`, once the prompts of other requests are stored, too."""
        found = self.found(request, key)
        for other in others:
            common = self._but_last(self._in_common(request, other), request.different)
            found = list(map(max, found, common))
        return found

    def _in_common(self, request: Request, other: Request) -> list[int]:
        """Tokens after which each of a request's different prompts can go on as one of another request's begins."""
        known = self._common.setdefault(request, WeakKeyDictionary())
        if other not in known:
            texts = PrefixTree(math.inf)
            for prompt in other.different:
                texts.insert(ids_of(prompt), [], "").release()
            common = [texts.num_stored(ids_of(prompt), "") for prompt in request.different]
            ends = {len(ids_of(prompt)) for prompt in other.different}
            known[other] = [
                num if num in ends else num // self._step * self._step if self._step else 0 for num in common
            ]
        return known[other]

    def _but_last(self, found: Sequence[int], prompts: Sequence[GivenPrompt]) -> list[int]:
        most = [max(0, len(ids_of(prompt)) - self._least_new) for prompt in prompts]
        return list(map(min, found, most))
