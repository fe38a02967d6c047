"""The forwards of speculative decoding: of one token per row, and of a draft per row, of which a part is taken back.

What is rejected is taken back from the cache (`KVStore.take_back`).
"""

# Legend: B rows of a forward, C tokens of it, V vocabulary.

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from policies.row_values import row_values, sent
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore
from runahead.cache.fixed import FixedCache
from runahead.cache.kv_cache import KVCache
from runahead.cache.rows import RowsCache
from runahead.decoding.forward import Forward, forward_over
from runahead.model.model import Model
from runahead.ranks.accelerator import accelerator_for
from runahead.reuse.rows import rows_cache


def verified(
    model: Model, caches: Sequence[KVStore], stored: Sequence[int], ids: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Logits (C, V) of rows after each of some tokens, which are stored, by one forward.

    Args:
        caches: of one row each.
        stored: number of tokens in each.
        ids: tokens of each row, at least one.
    """
    start, longest = max(stored), max(map(len, ids))
    pads = [start - num for num in stored]
    cache = RowsCache(caches, pads, [len(of_row) for of_row in ids])
    filled = [[*of_row, *[0] * (longest - len(of_row))] for of_row in ids]
    ids_BC = sent(torch.tensor(filled), model.device)
    attention = CausalAttention(cache, start=start, pads=pads)
    with model.ranges("verification of", ids_BC.shape[1], "tokens"):
        logits_BCV = model.forward(ids_BC, attention, start=start, pads=pads, all_logits=True)
    return [logits_CV[: len(of_row)] for of_row, logits_CV in zip(ids, logits_BCV, strict=True)]


class RowForwards:
    """Forwards over a prompt's KV cache, whose rows may advance by different numbers of tokens.

    Until the first draft is verified, a plain step is that of decoding without speculation. On a GPU it always is, so
    that a graph is replayed; the forward of drafts runs without a graph, over the same memory.

    Args:
        cache: the prompt's, which takes back tokens.
        pads: left padding per row.
        num_tokens: number of tokens of the padded prompt.

    Attributes:
        cache: with the keys and values of all rows.
        rows: the cache of each row, in the same memory.
        stored: number of tokens of each row that are stored, without padding.

    Raises:
        NotImplementedError: no token can be taken back from this cache.
    """

    def __init__(self, model: Model, cache: KVStore, *, pads: list[int], num_tokens: int) -> None:
        self.cache = cache
        if model.repeats_steps and accelerator_for(model.device) is not None and FixedCache.takes(cache):
            assert isinstance(cache, KVCache)
            self.cache = FixedCache(cache, pads=pads, num_tokens=num_tokens, apart=True)
        else:
            self.cache = cache.for_decoding()
        self._model, self._pads = model, pads
        self.rows: Sequence[KVStore] = self.cache.split(pads)
        for row in self.rows:
            row.take_back(0)
        self.stored = [num_tokens - pad for pad in pads]
        self._on_device = list(self.stored)  # of tensors of fixed shape
        self._in_step, self._all = True, list(range(len(pads)))
        self._whole = forward_over(model, self.cache, [], pads=pads, prompt_tokens=num_tokens)
        self._grouped: tuple[list[int], list[tuple[list[int], Forward]]] | None = None

    @property
    def warm_up(self) -> int:
        """Plain steps after which one takes the time that later ones take."""
        return 4 if self.cache.repeats_steps else 2  # a graph is captured in the third

    def plain(self, last_ids: Mapping[int, int]) -> dict[int, Tensor]:
        """Logits (V) of rows, by their number, after the last token of each, which is stored."""
        live = list(last_ids)
        if isinstance(self.cache, FixedCache):
            return self._fixed(last_ids)
        if self._in_step:
            ids = [last_ids.get(row, 0) for row in self._all]
            start = max(stored + pad for stored, pad in zip(self.stored, self._pads, strict=True))
            logits_BV = self._whole(self._ids(ids), start)
            self.stored = [stored + 1 for stored in self.stored]
            return {row: logits_BV[row] for row in live}
        found: dict[int, Tensor] = {}
        for rows, forward in self._groups_of(live):
            logits_BV = forward(self._ids([last_ids[row] for row in rows]), max(self.stored[row] for row in rows))
            found |= dict(zip(rows, logits_BV, strict=True))
        for row in live:
            self.stored[row] += 1
        return found

    def verify(self, ids: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Logits (C, V) of rows, by their number, after each of these tokens, which are stored."""
        self.leave_step()
        found: dict[int, Tensor] = {}
        for rows in self._groups(list(ids)):
            caches, stored = [self.rows[row] for row in rows], [self.stored[row] for row in rows]
            found |= dict(zip(rows, verified(self._model, caches, stored, [ids[row] for row in rows]), strict=True))
        for row, of_row in ids.items():
            self.stored[row] += len(of_row)
        return found

    def leave_step(self) -> None:
        """From now on rows may advance by different numbers of tokens."""
        self._in_step = len(self._all) == 1  # a single row has nothing to be in step with
        self._grouped = None

    def take_back(self, row: int, num: int) -> None:
        """Forget the last tokens of a row that are stored."""
        self.set_stored(row, self.stored[row] - num)
        self.rows[row].take_back(num)

    def set_stored(self, row: int, num: int) -> None:
        """Note how many tokens of a row are stored."""
        if self.stored[row] != num:
            self.stored[row], self._grouped = num, None

    def _fixed(self, last_ids: Mapping[int, int]) -> dict[int, Tensor]:
        """A plain step of all rows, also of those that have ended, in tensors of fixed shape."""
        assert isinstance(self.cache, FixedCache)
        last = self.cache.lengths.room - 1
        wanted = [min(self.stored[row], last) for row in self._all]
        if wanted != self._on_device:
            self.cache.set_lengths(wanted)
        logits_BV = self._whole(self._ids([last_ids.get(row, 0) for row in self._all]), 0)
        self._on_device = [stored + 1 for stored in wanted]
        for row in last_ids:
            self.stored[row] += 1
        return {row: logits_BV[row] for row in last_ids}

    def _groups(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows that one forward computes: all, or those of the same length if the model counts positions by itself."""
        groups: dict[Hashable, list[int]] = {}
        for row in rows:
            groups.setdefault(None if self._model.uneven_limit is None else self.stored[row], []).append(row)
        return list(groups.values())

    def _groups_of(self, live: list[int]) -> list[tuple[list[int], Forward]]:
        """Groups of rows and the forward of each, which are the same as long as all of them take plain steps."""
        if self._grouped is None or self._grouped[0] != live:
            self._grouped = live, [(rows, self._forward(rows)) for rows in self._groups(live)]
        return self._grouped[1]

    def _forward(self, rows: Sequence[int]) -> Forward:
        longest = max(self.stored[row] for row in rows)
        pads = [longest - self.stored[row] for row in rows]
        cache = rows_cache([self.rows[row] for row in rows], pads)
        return forward_over(self._model, cache, [], pads=pads, prompt_tokens=longest)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return row_values(ids, self._model.device)[:, None]
