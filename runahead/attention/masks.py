"""Attention masks as rules: the keys that a query sees, as the model family defines it, without an S x S mask."""

# Legend: C queries, S keys.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_overlay,
    or_masks,
)

_AND, _OR, _BLOCKS, _CHUNKS = (
    made.__code__
    for made in (and_masks(), or_masks(), blockwise_overlay(torch.empty(0)), chunked_overlay(1, torch.empty(0)))
)
"""The code of transformers' intersections and unions, of overlays by which the parts of an image see each other, and of
those by which a token sees its chunk alone."""

BLOCK = 256
"""Queries whose masks are looked at together."""


class MaskRule:
    """A family's mask as a rule over (query position, key position).

    transformers builds every mask from an index function (causal, sliding window, chunked, ...) and passes it to the
    mask function of the attention implementation. This class keeps the index function, so that attention can evaluate
    it one block at a time and can tell cheaply when it is plain causal attention. Two kinds of tensors in it are left
    out. The runtime gives token ids alone, so a text has no blocks of images; and its positions are those of the tokens
    in their row, so there is no padding before them.
    """

    ndim = 0  # Falcon and MPT look at these two before they pass a mask on

    def __init__(self, mask_function: Callable[..., Any], device: torch.device | str = "cpu") -> None:
        self._mask_function = mask_function = _of_text(mask_function) or mask_function
        # On the host, so that nobody waits for a GPU, unless the function holds tensors.
        self._device = device if _may_hold_tensors(mask_function) else "cpu"
        self._is_causal = mask_function is causal_mask_function  # needs no evaluation, nor a wait for a GPU
        self._plain: dict[tuple[int, int, int], bool] = {}
        self._first_key: dict[int, int] = {}
        self._first_keys: dict[tuple[int, int], Tensor | None] = {}
        self._windows: dict[tuple[int, int], int | None] = {}

    def to(self, *_args: Any, **_kwargs: Any) -> MaskRule:
        return self

    def __getitem__(self, _index: object) -> MaskRule:
        """The rule itself, where Gemma 4 cuts a mask to some of the queries: positions tell which these are."""
        return self

    def allowed(self, q_C: Tensor, kv_S: Tensor) -> Tensor:
        """Boolean (C, S): whether the query at each position sees the key at each position."""
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=q_C.device)
        mask = self._mask_function(zero, zero, q_C[None, None, :, None], kv_S[None, None, None, :])
        mask = torch.as_tensor(mask, device=q_C.device)
        return mask.expand(1, 1, len(q_C), len(kv_S))[0, 0]

    @property
    def sees_everything(self) -> bool:
        """Whether every query sees all keys before it, however many there are."""
        return self._is_causal

    @property
    def sees_later_keys(self) -> bool:
        """Whether the first query sees the key after it."""
        zero, one = torch.tensor([0], device=self._device), torch.tensor([1], device=self._device)
        return not self._is_causal and bool(self.allowed(zero, one).any())

    def first_key(self, query: int) -> int:
        """Position of the earliest key that a query sees; it never decreases from query to query."""
        if self._is_causal:
            return 0
        if query not in self._first_key:
            keys = torch.arange(query + 1, device=self._device)
            row = self.allowed(keys[-1:], keys)[0]
            self._first_key[query] = int(row.to(torch.uint8).argmax()) if bool(row.any()) else query
        return self._first_key[query]

    def first_keys(self, start: int, end: int) -> Tensor | None:
        """Positions (C, int64) of the earliest keys that the queries [start, end) see, on the rule's device.

        Returns:
            None, if one of them does not see all keys from there to its own position, and no other, or sees an earlier
            key than the query before it.
        """
        if (start, end) not in self._first_keys:
            found = [self._firsts(row, min(row + BLOCK, end)) for row in range(start, end, BLOCK)]
            known = [each for each in found if each is not None]
            firsts_C = torch.cat(known) if len(known) == len(found) else None
            if firsts_C is not None and not bool((firsts_C[1:] >= firsts_C[:-1]).all()):
                firsts_C = None
            self._first_keys[start, end] = firsts_C
        return self._first_keys[start, end]

    def _firsts(self, start: int, end: int) -> Tensor | None:
        """`first_keys` of a few queries, whose mask fits into memory."""
        queries = torch.arange(start, end, device=self._device)
        # With one key before those of the first query, and one after all queries, which nobody may see.
        keys = torch.arange(max(0, self.first_key(start) - 1), end + 1, device=self._device)
        allowed_CS = self.allowed(queries, keys)
        firsts_C = keys[allowed_CS.to(torch.uint8).argmax(dim=1)]
        seen_CS = (keys[None] >= firsts_C[:, None]) & (keys[None] <= queries[:, None])
        return firsts_C if bool((allowed_CS == seen_CS).all()) else None

    def window(self, start: int, end: int) -> int | None:
        """How many keys the queries [start, end) see, of which the last is at their own position.

        Decided from a few rows, as `is_causal`, and their neighbours, of which a rule in chunks sees other keys.

        Returns:
            None, if they see others, or a GPU would be waited for.
        """
        if torch.device(self._device).type != "cpu":
            return None
        if (start, end) not in self._windows:
            middle = (start + end) // 2
            rows = {max(start, row) for row in (start, start + 1, middle, middle + 1, end - 2, end - 1) if row < end}
            size = end - self.first_key(end - 1)
            queries = torch.tensor(sorted(rows))
            keys = torch.arange(max(0, min(self.first_key(start), start - size + 1) - 1), end)
            distances_CS = queries[:, None] - keys[None, :]
            seen_CS = (distances_CS >= 0) & (distances_CS < size)
            is_window = bool((self.allowed(queries, keys) == seen_CS).all())
            self._windows[start, end] = size if is_window else None
        return self._windows[start, end]

    def is_causal(self, start: int, end: int, first: int = 0) -> bool:
        """Whether queries [start, end) see exactly the keys [first, own position].

        Decided from a few rows, since index functions are uniform or move forward monotonically.
        """
        if self._is_causal:
            return True
        key = (start, end, first)
        if key not in self._plain:
            queries = torch.tensor(sorted({start, (start + end) // 2, end - 1}), device=self._device)
            keys = torch.arange(first, end, device=self._device)
            causal_CS = keys[None, :] <= queries[:, None]
            self._plain[key] = bool((self.allowed(queries, keys) == causal_CS).all())
        return self._plain[key]


def rule_of(mask: MaskRule | None) -> MaskRule | None:
    """The rule of the mask that a layer is given; None if it is plain causal attention."""
    return None if mask is None or mask.sees_everything else mask


def _of_text(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The mask function for a text alone.

    It has no overlays for the blocks of images, and its chunks know no padding. None if nothing is left.

    The tensors of an overlay are not looked at: each forward makes others, and reading them would wait for a GPU.
    """
    code = getattr(function, "__code__", None)
    if code is _BLOCKS:
        return None
    if code is _CHUNKS:
        held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        return _chunks(held["chunk_size"].cell_contents)
    if code is not _AND and code is not _OR:
        return function
    [parts] = (cell.cell_contents for cell in function.__closure__ or ())
    left = [_of_text(part) for part in parts]
    if left == list(parts):
        return function
    kept = [part for part in left if part is not None]
    if code is _AND:
        return and_masks(*kept) if len(kept) == len(left) else None
    return or_masks(*kept) if len(kept) > 1 else next(iter(kept), None)


def _chunks(num_tokens: int) -> Callable[..., Any]:
    """The mask function by which a token sees the keys of its chunk of so many tokens."""

    def same_chunk(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return key // num_tokens == query // num_tokens

    return same_chunk


def _may_hold_tensors(value: object) -> bool:
    """Whether a function refers to tensors: directly, or in the functions that it is made of."""
    if isinstance(value, (list, tuple)):
        return any(map(_may_hold_tensors, value))
    if isinstance(value, partial):
        return _may_hold_tensors([value.func, *value.args, *value.keywords.values()])
    if hasattr(value, "__code__"):
        return any(_may_hold_tensors(cell.cell_contents) for cell in value.__closure__ or ())  # type: ignore[attr-defined]
    return not isinstance(value, (bool, int, float, str, type(None)))


def keep_mask_rule(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> MaskRule:
    """Mask function that is registered with transformers: returns the rule in place of a mask tensor."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    device = kwargs.get("device") or next((tensor.device for tensor in tensors), "cpu")
    return MaskRule(mask_function, device)
