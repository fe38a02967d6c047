"""Tokens of a text that lie in a layer that grows: a stage's part of it, or rows with gaps between their positions.

`ShardIndex` is the same for slabs of a size that is known ahead, where every token stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch

from policies.row_values import sent
from runahead.attention.op import Span, spans_of


@dataclass(frozen=True, kw_only=True, eq=False)
class GappedRows:
    """The tokens of rows whose prompts have gaps between their positions, in order.

    Attributes:
        given: positions of each row's prompt.
        ends: position of the first generated token of each row.
    """

    given: Sequence[Sequence[int]]
    ends: Sequence[int]

    @cached_property
    def rows(self) -> Sequence[GappedRows]:
        """Each row alone: the same in all layers, so that its spans are made once."""
        return [GappedRows(given=[given], ends=[end]) for given, end in zip(self.given, self.ends, strict=True)]

    def spans(self, num_slots: int, num_new: int, device: torch.device) -> Sequence[Span]:
        """So many slots of a layer, padded on the left, as the newest tokens see them by their positions."""
        spans, num_generated = list[Span](), num_slots - max(map(len, self.given))
        for row, (given, end) in enumerate(zip(self.given, self.ends, strict=True)):
            at, rows = [*given, *range(end, end + num_generated)], slice(row, row + 1)
            spans.append(
                Span(
                    rows=rows,
                    stored=rows,
                    pad=0,
                    slots=range(num_slots - len(at), num_slots),
                    at=at,
                    at_T=sent(torch.tensor(at), device),
                    queries=range(num_new),
                    positions=at[-num_new:],
                    has_new=True,
                )
            )
        return spans


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
