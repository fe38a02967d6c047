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
    """

    def __init__(self, least_new: int = 1) -> None:
        self._texts, self._num_changes, self._least_new = PrefixTree(math.inf), 0, least_new
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
        """Tokens with which each of a request's different prompts begins as one of another request's does."""
        known = self._common.setdefault(request, WeakKeyDictionary())
        if other not in known:
            texts = PrefixTree(math.inf)
            for prompt in other.different:
                texts.insert(ids_of(prompt), [], "").release()
            known[other] = [texts.num_stored(ids_of(prompt), "") for prompt in request.different]
        return known[other]

    def _but_last(self, found: Sequence[int], prompts: Sequence[GivenPrompt]) -> list[int]:
        most = [max(0, len(ids_of(prompt)) - self._least_new) for prompt in prompts]
        return list(map(min, found, most))
