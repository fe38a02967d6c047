"""Keys by columns: an index that stores what it has of each key, such as dims or hashes, as columns of all keys."""

# Legend: B batch, K kv heads, G query heads of one KV head, n slots, m kept ones, C new tokens, H key dim,
# r columns of the index, c some of them, T slots with room, X heads, or columns, of all rows.

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from policies.precision import widened
from policies.retriever import Index, PromptView, Retriever

FEW_QUERIES = 8
"""Most queries of a KV head that sum some columns where they are, rather than multiply a copy of these."""
PART = 1024
"""Keys of a KV head whose columns are made at once, or pairs of a key and a query that are compared by them."""


class Columns(Index):
    """Index of the keys of all slots, a column of all of them side by side; `products` is for columns of floats."""

    def __init__(self, view: PromptView, how: Retriever) -> None:
        super().__init__(view, how)
        # Columns before tokens: one query's scores are sums of whole columns (1.6 times faster on a CPU).
        none_BKr0 = self.columns(view.k_BKnH[:, :, :0])
        self._columns_BKrT = none_BKr0.new_empty(*none_BKr0.shape[:3], self.num_slots + view.room)
        self.num_slots = 0
        Columns.append(self, view.k_BKnH, view.v_BKnV)

    def columns(self, k_BKCH: Tensor) -> Tensor:
        """Columns (B, K, r, C) of these keys."""
        return k_BKCH.transpose(-1, -2)

    @property
    def num_bytes(self) -> int:
        return self._columns_BKrT.nbytes

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        end = self.num_slots + k_BKCH.shape[2]
        if end > self._columns_BKrT.shape[3]:
            old = self._columns_BKrT
            self._columns_BKrT = old.new_empty(*old.shape[:3], end + end // 8)
            self._columns_BKrT[..., : self.num_slots] = old[..., : self.num_slots]
        for first in range(0, k_BKCH.shape[2], PART):  # all columns at once would take twice the memory
            part_BKrt = self.columns(k_BKCH[:, :, first : first + PART])
            self._columns_BKrT[..., self.num_slots : self.num_slots + part_BKrt.shape[3]] = part_BKrt
            self.num_slots += part_BKrt.shape[3]

    def keep(self, slots_BKm: Tensor, k_BKmH: Tensor, v_BKmV: Tensor) -> None:
        self._columns_BKrT = self._columns_BKrT.take_along_dim(slots_BKm[:, :, None], dim=3)
        self.num_slots = slots_BKm.shape[2]

    def overwrite(self, slots_BK: Tensor, k_BKH: Tensor, v_BKV: Tensor) -> None:
        columns_BKr1 = self.columns(k_BKH.unsqueeze(2))
        self._columns_BKrT.scatter_(3, slots_BK[:, :, None, None].expand_as(columns_BKr1), columns_BKr1)

    def fork(self, stored: Callable[[], Tensor]) -> Self:
        other = super().fork(stored)
        other._columns_BKrT = self._columns_BKrT[..., : self.num_slots].clone()
        return other

    def products(self, q_BKGr: Tensor, columns_BKc: Tensor | None = None) -> Tensor:
        """Products (B, K, G, n) of queries and all keys in columns of floats, in at least float32.

        Args:
            columns_BKc: the columns of which queries are given; None is all.
        """
        batch, heads, width, room = self._columns_BKrT.shape
        keys_XrT = self._columns_BKrT.flatten(0, 1)
        if columns_BKc is not None:
            first_BK1 = torch.arange(0, batch * heads * width, width, device=q_BKGr.device).view(batch, heads, 1)
            rows_BKc, keys_XT = columns_BKc + first_BK1, self._columns_BKrT.view(-1, room)
            if q_BKGr.shape[2] <= FEW_QUERIES:
                rows_Xc, weights_Xc = rows_BKc.unsqueeze(2).expand(q_BKGr.shape).flatten(0, 2), q_BKGr.flatten(0, 2)
                products_XT = embedding_bag(rows_Xc, keys_XT, mode="sum", per_sample_weights=weights_Xc)
                return widened(products_XT.view(*q_BKGr.shape[:3], room)[..., : self.num_slots])
            keys_XrT = keys_XT[rows_BKc.flatten(0, 1)]
        products_XGn = q_BKGr.flatten(0, 1).bmm(keys_XrT[..., : self.num_slots])
        return widened(products_XGn.unflatten(0, (batch, heads)))
