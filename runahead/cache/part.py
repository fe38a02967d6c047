"""A stage's part of a text that grows or is cut back: the kept tokens of its chunk, and the new ones that come here.

`ShardIndex` is the same for slabs of a size that is known ahead, where every token stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from policies.row_values import sent
from runahead.attention.op import Span, spans_of


class TextPart:
    """The tokens of a text that a stage stores, in layers that grow or are cut back.

    Args:
        indices: index in the padded batch of the token in each slot of a layer that is never cut back.
        pads: left padding of each row of the batch.
        owns: index of the first of a forward's new tokens -> whether all of them are stored here.
    """

    def __init__(self, indices: Sequence[int], *, pads: Sequence[int], owns: Callable[[int], bool]) -> None:
        self.indices, self.owns = list(indices), owns
        self._pads = list(pads)

    def takes(self, start: int, num_new: int) -> bool:
        """Whether the new tokens from this index on are stored here; called before each layer stores them."""
        if not self.owns(start):
            return False
        if not self.indices or self.indices[-1] < start:  # in the first layer
            self.indices += range(start, start + num_new)
        return True

    def spans(
        self, slots: range, pads: Sequence[int], *, start: int, num_new: int, device: torch.device
    ) -> Sequence[Span]:
        """Where the tokens of a layer lie, as the newest ones see them, wherever those are stored.

        Args:
            slots: of the layer.
            pads: padding slots on the left of each row.
            start: index of the first of the newest tokens.
        """
        has_new = self.owns(start)
        # Slots are in causal order whichever tokens they hold.
        first_new = slots.stop - num_new if has_new else slots.stop
        spans = spans_of(slots, start=first_new, num_new=num_new, pads=pads, has_new=has_new)

        @cache
        def by_position() -> Sequence[Span]:
            assert len(slots) == len(self.indices), "of a layer that was cut back only the order of tokens is known"
            at, at_T = self.indices, sent(torch.tensor(self.indices), device)
            return spans_of(slots, start=start, num_new=num_new, pads=self._pads, at=at, at_T=at_T, has_new=False)

        def apart(number: int) -> Sequence[Span]:
            return by_position() if len(spans) == 1 else by_position()[number : number + 1]

        return [replace(span, apart=partial(apart, number)) for number, span in enumerate(spans)]
