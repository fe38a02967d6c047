"""Interface of a method that reuses keys and values: segments that a prompt takes from the store, and new tokens.

A segment is a set of tokens at fixed positions whose keys and values are computed once; its tokens attend to each other
only. Positions of a prompt need not be contiguous: a token attends to all tokens at lower positions.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens whose keys and values are stored.

    Attributes:
        name: name in messages and reports. Segments of the same content are interchangeable.
        ids, positions: its tokens and their positions, ascending.
        placeholders: indices of tokens that reserve positions: others attend to them, but they are not stored.
        context_ids, context_positions: tokens before the segment that it also attends to and that are not part of it.
        pinned: whether it stays in memory.
    """

    name: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    placeholders: tuple[range, ...] = ()
    context_ids: tuple[int, ...] = ()
    context_positions: tuple[int, ...] = ()
    pinned: bool = False

    def __post_init__(self) -> None:
        positions = (*self.context_positions, *self.positions)
        assert len(self.ids) == len(self.positions) and len(self.context_ids) == len(self.context_positions)
        assert all(a < b for a, b in pairwise(positions)), f"{self.name}: positions do not ascend"

    @cached_property
    def stored(self) -> list[int]:
        """Indices of the tokens whose keys and values are stored, in the order in which they are numbered."""
        dropped = {index for run in self.placeholders for index in run}
        return [index for index in range(len(self.ids)) if index not in dropped]

    @cached_property
    def stored_positions(self) -> list[int]:
        return [self.positions[index] for index in self.stored]

    @cached_property
    def content_key(self) -> str:
        """Digest (64 hexadecimal digits) of all tokens and positions."""
        digest = hashlib.sha256()
        for numbers in (
            self.ids,
            self.positions,
            [edge for run in self.placeholders for edge in (run.start, run.stop)],
            self.context_ids,
            self.context_positions,
        ):
            digest.update(len(numbers).to_bytes(8, "little") + array("q", numbers).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class SegmentUse:
    """Part of a segment that a prompt reuses: `parts` are ranges of its stored tokens, by ascending position."""

    segment: Segment
    parts: tuple[range, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.parts))

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """Position and id of each token."""
        stored, segment = self.segment.stored, self.segment
        indices = [index for part in self.parts for index in stored[part.start : part.stop]]
        return [(segment.positions[index], segment.ids[index]) for index in indices]


@dataclass(frozen=True, kw_only=True)
class ReusingPrompt:
    """A prompt that reuses segments.

    Attributes:
        uses: reused parts of segments, whose tokens are all at different positions.
        new_ids, new_positions: tokens that are computed and their positions, ascending; they include the last token.
        blended: parts of segments whose tokens are among the new ones. The first layers compute all of these tokens,
            later ones only those whose keys and values differ most from the stored ones, which serve for the others.
        share: share of the `blended` tokens that later layers compute, as a mean over these layers.
    """

    uses: tuple[SegmentUse, ...]
    new_ids: tuple[int, ...]
    new_positions: tuple[int, ...]
    blended: tuple[SegmentUse, ...] = ()
    share: float = 0.0

    def __post_init__(self) -> None:
        assert {token for use in self.blended for token in use.tokens} <= set(
            zip(self.new_positions, self.new_ids, strict=True)
        ), "a blended token is not among the new ones"
        assert 0 <= self.share <= 1, self.share
        every = sorted([*(position for use in self.uses for position, _ in use.tokens), *self.new_positions])
        assert self.new_ids and len(self.new_ids) == len(self.new_positions)
        assert all(a < b for a, b in pairwise(self.new_positions)), "positions of new tokens do not ascend"
        assert all(a < b for a, b in pairwise(every)), "two tokens are at one position"
        assert every[-1] == self.new_positions[-1], "the last token is not computed"

    def __len__(self) -> int:
        """Number of tokens that a prefill computes, at least in the first layers, as for a prompt of token ids."""
        return len(self.new_ids)

    @property
    def all_uses(self) -> tuple[SegmentUse, ...]:
        """`uses` and `blended`."""
        return (*self.uses, *self.blended)

    @property
    def num_cached(self) -> int:
        """Tokens whose stored keys and values are used, in all layers or in some."""
        return sum(use.num_tokens for use in self.all_uses)

    @property
    def num_held(self) -> int:
        """Tokens for which its segments need memory, when they are encoded and later; also of those used in part."""
        return sum(len(use.segment.ids) for use in self.all_uses)

    @property
    def end(self) -> int:
        """Position of the first token that is generated."""
        return self.new_positions[-1] + 1

    @cached_property
    def ids(self) -> list[int]:
        """All tokens in the order of their positions: the prompt as plain text."""
        at = dict(zip(self.new_positions, self.new_ids, strict=True))
        for use in self.uses:
            at.update(use.tokens)
        return [at[position] for position in sorted(at)]


class PromptTooLong(ValueError):
    """A prompt and its new tokens are longer than the model, or the memory, has room for."""


GivenPrompt = list[int] | ReusingPrompt
"""A prompt: token ids, or a prompt that reuses segments."""


def ids_of(prompt: GivenPrompt) -> list[int]:
    """All tokens of a prompt, reused ones too, in the order of their positions."""
    return prompt.ids if isinstance(prompt, ReusingPrompt) else prompt


def reuse_segments(prompts: Sequence[GivenPrompt]) -> bool:
    """Whether a prompt reuses segments."""
    return any(isinstance(prompt, ReusingPrompt) for prompt in prompts)
