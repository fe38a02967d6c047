"""Placement of a prompt: the tokens that it reuses from each segment, and the positions of new tokens.

Arguments are placed in their slots. Text between imports is placed after everything that the prompt has before it, and
must fit before what follows; text at the end is placed after everything. Link tokens, the first few of every run of
reused tokens, are computed again in context, since they were encoded without the tokens before them; of the tokens
after them a share may be, which is chosen while the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from policies.prompt_cache.layout import OUTSIDE, Layout, ModuleLayout
from policies.prompt_cache.model_text import ModelText
from policies.prompt_cache.prompt import Import, Item, NewText, Prompt
from policies.prompt_cache.xml_reader import PMLError
from policies.reuse import PromptTooLong, ReusingPrompt, Segment, SegmentUse

LINK_TOKENS = 4


class PromptPlacement:
    """Placement of one prompt.

    Args:
        prompt: prompt that was checked against the layout's schema.
        layout: layout of the schema.
        text: tokenizer and chat template of the model.
    """

    def __init__(self, prompt: Prompt, layout: Layout, text: ModelText) -> None:
        self._prompt, self._layout, self._text = prompt, layout, text
        imports = [item for item in prompt.items if isinstance(item, Import)]
        arguments = {item.module: (item.arguments, item.line) for item in imports}
        if OUTSIDE in layout.by_name:
            arguments[OUTSIDE] = prompt.arguments, prompt.line
        self._arguments = arguments
        self._new: dict[int, int] = {}
        self._taken = {position for name in arguments for position in layout.by_name[name].tokens}
        """Positions of all imported modules, including their slots."""

    def place(self, link_tokens: int, recompute: float = 0.0) -> ReusingPrompt:
        """Place the prompt.

        Args:
            link_tokens: first tokens of every run of reused ones that are computed again.
            recompute: share of the others that is computed again, chosen while the prompt is computed; of the first
                run none is, since nothing comes before it.

        Raises:
            PMLError: an argument is too long, or text does not fit.
            PromptTooLong: the model has too few positions.
        """
        self._place_arguments()
        self._place_texts()
        chosen = self._segments()
        reused = {position for _, positions in chosen for position in positions}
        if not reused and not self._new:
            raise self._error(None, "has no tokens; import a module or give it text")
        first, last = min(reused | self._new.keys()), max(reused | self._new.keys())
        again = {last} & reused  # the last token is always computed, for its logits
        for _, positions in chosen:
            for start, end in _runs(sorted(positions)):
                if start > first:
                    again.update(range(start, min(end, start + link_tokens)))
        blended = {position for _, positions in chosen for position in positions} - again if recompute else set[int]()
        blended -= self._first_run(chosen, first)
        tokens = {p: t for segment, _ in chosen for p, t in zip(segment.positions, segment.ids, strict=True)}
        uses = _uses(chosen, reused - again - blended)
        self._new.update((position, tokens[position]) for position in again | blended)
        end, limit = max(self._new) + 1, self._layout.max_positions
        if limit is not None and end > limit:
            rule = f"reaches position {end:,} of the model's {limit:,}; shorten it"
            raise PromptTooLong(str(self._error(None, rule)))
        at = sorted(self._new)
        return ReusingPrompt(
            uses=uses,
            new_ids=tuple(self._new[p] for p in at),
            new_positions=tuple(at),
            blended=_uses(chosen, blended),
            share=recompute if blended else 0.0,
        )

    @staticmethod
    def _first_run(chosen: list[tuple[Segment, set[int]]], first: int) -> set[int]:
        """Positions of the first run of reused tokens, if it begins the prompt and was encoded without others."""
        for segment, positions in chosen:
            if first in positions and segment.positions[0] == first and not segment.context_ids:
                start, end = _runs(sorted(positions))[0]
                return set(range(start, end)) if segment.positions[: end - start] == tuple(range(start, end)) else set()
        return set()

    def _place_arguments(self) -> None:
        for name, (arguments, line) in self._arguments.items():
            for param, slot in self._layout.by_name[name].slots.items():
                ids = self._text.ids(arguments.get(param, ""))
                if len(ids) > len(slot):
                    rule = f"{param} has {len(ids)} tokens, and its slot {len(slot)}; shorten it"
                    raise PMLError(self._prompt.source, line, name or "prompt", rule)
                self._new.update(zip(slot, ids, strict=False))

    def _place_texts(self) -> None:
        """Place texts in the prompt's order; texts without an import between them are placed together."""
        end = 0
        waiting: list[NewText] = []
        for item in self._prompt.items:
            if isinstance(item, NewText):
                waiting.append(item)
                continue
            module = self._layout.by_name[item.module]
            if waiting:
                end = self._place_between(waiting, end, module)
                waiting = []
            end = max(end, module.end)
        start = max(self._taken | self._new.keys(), default=-1) + 1
        ids = self._tokens(waiting, start)
        if self._asks(waiting):
            ids += self._text.answer()
        self._new.update(enumerate(ids, start))

    def _place_between(self, texts: Sequence[NewText], start: int, following: ModuleLayout) -> int:
        """Place texts before a module and not before position `start`. Returns the position after them."""
        outside = self._layout.by_name.get(OUTSIDE)
        runs = _runs(list(outside.tokens)) if outside is not None else []
        start = max([start, *(end for _, end in runs if end <= following.start)])
        ids = self._tokens(texts, start)
        taken = self._taken | self._new.keys()
        room = next((index for index in range(len(ids)) if start + index in taken), len(ids))
        if room < len(ids):
            rule = (
                f"text in front of <{following.name}> has {len(ids)} tokens, and there is room for {room} at position "
                f'{start:,}; give the schema a <param name="..." len="{len(ids)}"/> there, or put the text at the end'
            )
            raise self._error(texts[0], rule)
        self._new.update(enumerate(ids, start))
        return start + len(ids)

    def _tokens(self, texts: Sequence[NewText], start: int) -> list[int]:
        ids: list[int] = []
        for text in texts:
            own = self._text.ids(text.text)
            if text.role is not None:
                try:
                    before, after = self._text.message(text.role, first=start == 0 and not ids)
                except ValueError as error:
                    raise self._error(text, str(error), text.role) from error
                own = [*before, *own, *after]
            elif start == 0 and not ids:
                own = [*self._text.front, *own]
            ids += own
        return ids

    def _asks(self, last_texts: Sequence[NewText]) -> bool:
        """Whether the model's answer is next in a chat."""
        return last_texts[-1].role == "user" if last_texts else self._layout.asks

    def _segments(self) -> list[tuple[Segment, set[int]]]:
        """Segments to use, with the positions to take from each: scaffolds first, by falling size."""
        layout, left = self._layout, set(self._arguments)
        chosen: list[tuple[Segment, set[int]]] = []

        def size(names: tuple[str, ...]) -> int:
            return sum(layout.by_name[name].num_stored for name in names)

        scaffolds = sorted(layout.scaffolds, key=size, reverse=True)
        for group in [*map(layout.scaffold_modules, scaffolds), *((name,) for name in self._arguments)]:
            own = set(group) - {OUTSIDE} or {OUTSIDE}
            if own <= left:
                taken = left.intersection(group)
                left -= taken
                positions = {position for name in taken for position in layout.by_name[name].stored}
                if positions:
                    chosen.append((layout.segment(group), positions))
        return chosen

    def _error(self, item: Item | None, rule: str, element: str = "prompt") -> PMLError:
        return PMLError(self._prompt.source, self._prompt.line if item is None else item.line, element, rule)


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges [start, end) of contiguous positions, from ascending positions."""
    if not positions:
        return []
    breaks = [index for index, (a, b) in enumerate(pairwise(positions), start=1) if b != a + 1]
    edges = [0, *breaks, len(positions)]
    return [(positions[first], positions[last - 1] + 1) for first, last in pairwise(edges)]


def _uses(chosen: list[tuple[Segment, set[int]]], positions: set[int]) -> tuple[SegmentUse, ...]:
    """The parts of the chosen segments at these positions."""
    found = [(segment, _parts(segment, of_segment & positions)) for segment, of_segment in chosen]
    return tuple(SegmentUse(segment=segment, parts=parts) for segment, parts in found if parts)


def _parts(segment: Segment, positions: set[int]) -> tuple[range, ...]:
    """Ranges of a segment's stored tokens at these positions."""
    index = [index for index, position in enumerate(segment.stored_positions) if position in positions]
    return tuple(range(start, end) for start, end in _runs(index))
