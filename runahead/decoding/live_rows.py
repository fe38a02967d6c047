"""Rows that are decoded together though they began at different times: each joins and leaves between two steps."""

# Legend: B rows of a prompt batch or of a group, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from policies.row_values import row_values
from runahead.cache.base import KVStore
from runahead.decoding.decode import Row
from runahead.decoding.forward import Forward, forward_over
from runahead.decoding.sampling import NOT_NUMBERS, next_tokens
from runahead.model.model import Model
from runahead.reuse.forks import fork
from runahead.reuse.rows import rows_cache
from runahead.thinning.rank_policies import RankPolicies

RowId = tuple[int, int]
"""Number of a prompt batch, and of the row in it."""


@dataclass(frozen=True)
class NewToken:
    """A row's next token, and how the row ended if it did: as `Row.finish_reason`, or by the error NOT_NUMBERS.

    A row that ends with that error has no token.
    """

    row: RowId
    token: int | None
    ended: str | None


@dataclass(eq=False, kw_only=True)
class LiveRow:
    """A row that goes on.

    Attributes:
        cache: of this row alone.
        num_tokens: tokens that the cache stores.
        num_shared: tokens before them that other rows of the same prompt share, after those that the prompt reused.
        number: of the row among all that have been.
    """

    id: RowId
    row: Row
    cache: KVStore
    num_tokens: int
    num_shared: int = 0
    number: int = field(default_factory=count().__next__)


@dataclass(kw_only=True)
class Group:
    """Rows that one forward decodes."""

    rows: list[LiveRow]
    forward: Forward


class LiveRows:
    """The rows that this rank decodes. All ranks of a stage make the same calls.

    One forward decodes all of them, so the weights are read once. With cache policies, which look at one row's cache as
    a whole, every row has a forward of its own. Of a model that counts positions from the start of the batch, rows of
    the same length share one.

    Args:
        on_leave: called with every row that leaves.
    """

    def __init__(
        self, model: Model, policies: RankPolicies, on_leave: Callable[[LiveRow], object] = lambda row: None
    ) -> None:
        self._model, self._policies, self._on_leave = model, policies, on_leave
        self._live: dict[RowId, LiveRow] = {}
        self._groups: list[Group] | None = None

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows' caches, of what rows share once."""
        caches = [each.cache for each in self._live.values()]
        shared = {id(cache.shared_TKX): cache.shared_TKX for cache in caches}
        shared_bytes = sum(layer_TKX.nbytes for layers_TKX in shared.values() for layer_TKX in layers_TKX)
        return sum(cache.num_bytes for cache in caches) + shared_bytes

    def join(
        self,
        ids: Sequence[RowId],
        rows: Sequence[Row],
        logits_BV: Tensor,
        cache: KVStore,
        lengths: Sequence[int],
        prompt_of: Sequence[int] | None = None,
    ) -> list[NewToken]:
        """Choose the first tokens of the rows of a prompt batch. Rows that do not end with them join.

        Args:
            ids: names of the rows.
            rows: without new tokens.
            logits_BV: of the prompts' last tokens.
            cache: of the prompts, padded on the left to the longest.
            lengths: tokens of each prompt that the cache stores; reused ones are not in it.
            prompt_of: number of each row's prompt; by default every row has a prompt of its own.
        """
        prompt_of = list(range(len(rows)) if prompt_of is None else prompt_of)
        caches = cache.for_decoding().split([max(lengths) - length for length in lengths])
        joining: dict[int, LiveRow] = {}
        for number, (of_prompt, length) in enumerate(zip(caches, lengths, strict=True)):
            places = [row for row, its_prompt in enumerate(prompt_of) if its_prompt == number]
            own, num_shared = [of_prompt], 0
            if len(places) > 1:
                num_new = max(rows[row].max_new_tokens for row in places) - 1  # the last one is not stored
                own, num_shared = fork(of_prompt, len(places), self._model, num_tokens=length, num_new=num_new)
            for row, each in zip(places, own, strict=True):
                joining[row] = LiveRow(
                    id=ids[row], row=rows[row], cache=each, num_tokens=length - num_shared, num_shared=num_shared
                )
        new = [joining[row] for row in range(len(rows))]
        self._live |= {each.id: each for each in new}
        self._groups = None
        return self._add(new, logits_BV if len(rows) == len(lengths) else logits_BV[prompt_of])

    def step(self) -> list[NewToken]:
        """Decode one token of every row, or some. Rows that end leave."""
        if self._groups is None:
            self._groups = self._grouped()
        return [new for group in self._groups for new in self._step(group)]

    def _step(self, group: Group) -> list[NewToken]:
        """Decode the rows of a group."""
        ids_B1 = row_values([each.row.new_ids[-1] for each in group.rows], self._model.device)[:, None]
        logits_BV = group.forward(ids_B1, max(each.num_tokens for each in group.rows))
        for each in group.rows:
            each.num_tokens += 1
        return self._add(group.rows, logits_BV)

    def drop(self, ids: Collection[RowId]) -> list[RowId]:
        """Let rows leave, those that are here. Returns their ids."""
        found = [each for id in ids if (each := self._live.pop(id, None)) is not None]
        if found:
            self._groups = None
        for each in found:
            self._on_leave(each)
        return [each.id for each in found]

    def _add(self, rows: Sequence[LiveRow], logits_BV: Tensor) -> list[NewToken]:
        samplers, found = [each.row.sampler for each in rows], list[NewToken]()
        for each, token in zip(rows, next_tokens(samplers, logits_BV, raises=False), strict=True):
            if token is not None:
                each.row.add(token)
            found.append(NewToken(each.id, token, NOT_NUMBERS if token is None else each.row.finish_reason))
        self.drop([new.row for new in found if new.ended is not None])
        return found

    def _grouped(self) -> list[Group]:
        groups: dict[Hashable, list[LiveRow]] = {}
        for each in self._live.values():
            key: Hashable = None
            if self._policies.chooses:
                key = each.id
            elif self._model.uneven_limit is not None:
                key = each.num_tokens
            groups.setdefault(key, []).append(each)
        return [Group(rows=rows, forward=self._forward(rows)) for rows in groups.values()]

    def _forward(self, rows: Sequence[LiveRow]) -> Forward:
        longest = max(each.num_tokens for each in rows)  # all rows grow by a token per step, so pads stay as they are
        pads = [longest - each.num_tokens for each in rows]
        cache = rows[0].cache if self._policies.chooses else rows_cache([each.cache for each in rows], pads)
        policies, prompt_tokens = self._policies.while_decoding, len(rows[0].row.prompt)
        return forward_over(self._model, cache, policies, pads=pads, prompt_tokens=prompt_tokens)
