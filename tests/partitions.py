"""Context partitions drawn by hypothesis, with the awkward ones made likely: empty chunks and chunks of one token."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy


@st.composite
def _boundaries(draw: DrawFn, num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    length = st.one_of(st.just(0), st.just(1), st.integers(0, num_tokens))
    takes_the_rest = draw(st.integers(0, num_ranks - 1))
    left, lengths = num_tokens, []
    for _ in range(num_ranks - 1):
        lengths.append(min(left, draw(length)))
        left -= lengths[-1]
    lengths.insert(takes_the_rest, left)
    return tuple(sum(lengths[:rank]) for rank in range(num_ranks + 1))


def boundaries(num_tokens: int, num_ranks: int) -> SearchStrategy[tuple[int, ...]]:
    """Boundaries of num_ranks chunks that cover num_tokens; any chunk may be empty or hold one token."""
    return _boundaries(num_tokens, num_ranks)
