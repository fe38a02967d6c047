"""Rank 0's knowledge of the texts that the last stage stores, and how much of waiting requests is among them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from policies.reuse import ids_of, reuse_segments
from runahead.reuse.prefix_tree import Change, PrefixTree, Stored, salted
from runahead.serving.request import Request


class KnownTexts:
    """The texts that the last stage has reported to store.

    What is stored of a request's prompts is looked up once per change of the texts, and what two requests have in
    common only once, since a queue asks for both whenever anything is reported.

    Args:
        least_new: last tokens of a prompt that are always computed.
        step: as of `Prefixes`.
    """

    def __init__(self, least_new: int = 1, step: int | None = None) -> None:
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
            key: of the model's texts without a salt.
        """
        looked_up, found = self._found.get(request, (-1, []))
        if looked_up != self._num_changes:
            found = [self._texts.num_stored(ids, salted(key, request.salt)) for ids in self._beginnings(request)]
            self._found[request] = self._num_changes, found
        return found

    def found_after(self, request: Request, others: Iterable[Request], key: str) -> list[int]:
        """The result of `found` after the prompts of other requests are stored, too. Scored ones are not."""
        found = self.found(request, key)
        for other in others:
            if other.salt == request.salt and other.scores is None:
                found = list(map(max, found, self._in_common(request, other)))
        return found

    def _in_common(self, request: Request, other: Request) -> list[int]:
        """Count the tokens after which each different prompt can go on as one of another request begins."""
        known = self._common.setdefault(request, WeakKeyDictionary())
        if other not in known:
            texts, step = PrefixTree(math.inf), self._step
            for text in (tuple(ids_of(each)) for each in other.different if not reuse_segments([each])):
                texts.apply(Stored(key="tokens", ids=text))
                for states in [] if step is None else [False, True]:
                    texts.apply(Stored(key="whole", ids=text, states=states))
            known[other] = []
            for ids in self._beginnings(request):
                common = texts.num_stored(ids, "tokens")
                if step is not None:
                    common = max(texts.num_stored(ids, "whole"), common // step * step if step else 0)
                known[other].append(common)
        return known[other]

    def _beginnings(self, request: Request) -> list[list[int]]:
        """The first tokens of each different prompt that may be reused; the others are always computed.

        A prompt that reuses segments has none, and is not stored: they stand in the place of its prefix.
        """
        prompts = [[] if reuse_segments([each]) else ids_of(each) for each in request.different]
        return [ids[: max(0, len(ids) - self._least_new)] for ids in prompts]
