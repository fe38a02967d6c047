"""Decoding over slabs as tensors of fixed shape: how many tokens are stored is a number on the device.

So a decoding step is the same operations on the same tensors every time, and a GPU can replay it as one graph.

Rows of a batch without padding lie in the slab as one sequence with the heads of all rows side by side. Rows with
padding are moved, without it, into sequences of their own. Either way one call attends to all of them.
"""

# Legend: B batch, K kv heads, S sequences, J new tokens, T tokens, X = H + V (key and value).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.row_values import row_values, sent
from runahead.attention.op import Lengths
from runahead.attention.partial import takes_sequences
from runahead.cache.base import KVStore
from runahead.cache.index import ALL_TOKENS, ShardIndex, SlabIndex, Write
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens, num_tokens_of
from runahead.cache.shard import Shard
from runahead.cache.slabs import KVSlab, Slabs


def in_fixed_shape(cache: KVStore, *, pads: Sequence[int], num_tokens: int, apart: bool = False) -> KVCache | None:
    """A prompt's KV cache for decoding, one token per row and step; its slabs are taken over.

    Args:
        pads: left padding per row.
        num_tokens: of the padded prompt.
        apart: each row is a sequence of its own, also without padding, so that rows can advance by different numbers of
            tokens.

    Returns:
        None, and the cache is left as it is, unless it is slabs of a whole text or of a stage's shard of it, on a
        device with a fitting kernel.

    Raises:
        ValueError: there is no memory in which to move padded rows.
    """
    slabs, index = cache.slabs, cache.slab_index
    if slabs is None or index is None or cache.rotates or slabs.is_ring:
        return None
    shard = Shard.whole(num_tokens) if index is ALL_TOKENS else index.shard
    if shard is None or any(slab.first != shard.chunk.start for slab in slabs.by_layer):
        return None
    device = slabs.device
    if not all(takes_sequences(device, shape.dtype, shape.key_dim, shape.value_dim) for shape in slabs.shapes):
        return None
    room = min(len(slab.slab_TBKX) for slab in slabs.by_layer)
    fixed = DeviceIndex(shard, device, pads=pads, room=room, apart=apart, is_part=index.is_part)
    by_layer = [fixed.placed(slab) for slab in slabs.take()]
    made = KVCache(Slabs.each_its_own(by_layer), fixed)
    if fixed.moves_rows:  # a layer is there twice while its rows are moved
        made.peak_bytes = made.num_bytes + max(layer.num_bytes for layer in made.layers)
    return made


class DeviceIndex(SlabIndex):
    """Index of one new token per row and step, on the device; the same for all layers.

    Args:
        shard: what is stored of the text.
        pads: left padding per row.
        room: slots of a layer, in which each sequence lies.
        apart: each row is a sequence of its own, also without padding.
        is_part: the rest of the text is on other ranks.
    """

    repeats_steps = True

    def __init__(
        self, shard: Shard, device: torch.device, *, pads: Sequence[int], room: int, apart: bool, is_part: bool
    ) -> None:
        self.is_part, self._chunk, self._batch = is_part, shard.chunk, len(pads)
        self.shard = shard if is_part else None
        by_row = any(pads) or (apart and len(pads) > 1)
        self._stored = [num_tokens_of(pad, shard.chunk) for pad in pads] if by_row else [len(shard.chunk)]
        self._texts = [shard.num_tokens - pad for pad in pads] if by_row else [shard.num_tokens]
        self._most = [room - 1] * len(self._texts)
        starts, stored_S = torch.arange(len(self._stored) + 1) * room, torch.tensor(self._stored)
        next_S, seen_S = starts[:-1] + stored_S, stored_S + 1
        self._steps: _Steps | None = None
        if shard.is_own:
            is_own_J1, before_J1 = torch.tensor(shard.is_own)[:, None], torch.tensor(shard.own_before[:-1])[:, None]
            next_JS = torch.where(is_own_J1, next_S + before_J1, starts[1:] - 1)
            seen_JS = stored_S + before_J1 + is_own_J1.long()
            next_S, seen_S = next_JS[0], seen_JS[0]
            self._most = [first + len(shard.is_own) - 1 for first in self._texts]
            self._steps = _Steps(
                next_JS=sent(next_JS, device),
                seen_JS=sent(seen_JS.int(), device),
                first_S=sent(torch.tensor(self._texts), device),
                step_S=torch.zeros(len(self._texts), dtype=torch.long, device=device),
            )
        self._lengths = Lengths(
            starts=sent(starts.int(), device), seen_S=sent(seen_S.int(), device), room=room, may_be_empty=is_part
        )
        self._next_S = sent(next_S.clone(), device)  # slot in which each sequence's next token is stored (int64)
        self._position_S = sent(shard.num_tokens - torch.tensor(pads if by_row else [0]), device)
        self.numbers = [self._lengths.starts, self._lengths.seen_S, self._next_S, self._position_S]

    @property
    def moves_rows(self) -> bool:
        """Whether rows lie in sequences of their own, into which they were moved."""
        return len(self._stored) > 1

    def placed(self, slab: KVSlab) -> KVSlab:
        """A prompt's slab as it is, or its rows one after another, (B * room, 1, K, X), each from its first token on.

        Raises:
            ValueError: there is no memory in which to move them.
        """
        if not self.moves_rows:
            return slab
        try:
            rows_BTKX = slab.slab_TBKX.new_empty(self._batch, self._lengths.room, *slab.slab_TBKX.shape[2:])
        except RuntimeError as error:  # torch.OutOfMemoryError on GPUs, a plain RuntimeError on CPUs
            raise ValueError(
                f"{slab.slab_TBKX.nbytes:,} bytes to move rows of different lengths for decoding do not fit on "
                f"{slab.slab_TBKX.device}; use a smaller prompt.batch, or prompts of equal length"
            ) from error
        end = len(self._chunk)
        for row, num in enumerate(self._stored):
            rows_BTKX[row, :num] = slab.slab_TBKX[end - num : end, row]
        return KVSlab(slab_TBKX=rows_BTKX.flatten(0, 1)[:, None], key_dim=slab.key_dim, first=0)

    def writes(self, tokens: NewTokens, num_new: int) -> Sequence[Write]:
        return [Write(self._next_S)]

    def spans(self, tokens: NewTokens, num_new: int) -> Lengths:
        return self._lengths

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor:  # noqa: N802
        return self._position_S.expand(self._batch)[:, None]

    def row(self, row: int, pad: int) -> SlabIndex:
        return ALL_TOKENS if self.shard is None else ShardIndex(self.shard.row(pad), self._next_S.device)

    def row_slab(self, slab: KVSlab, row: int, pad: int) -> KVSlab:
        if not self.moves_rows:  # all rows side by side
            return super().row_slab(slab, row, pad)
        first, room = row * self._lengths.room, self._lengths.room
        number = 0 if self.shard is None else self.shard.row(pad).chunk.start
        return KVSlab(slab_TBKX=slab.slab_TBKX[first : first + room], key_dim=slab.key_dim, first=number)

    def set_lengths(self, stored: Sequence[int]) -> None:
        """Tokens after these are forgotten. A row without room for its next token stores it over the last one."""
        # There is one sequence of all rows, if they are in step.
        stored = [min(num, most) for num, most in zip(stored, self._most, strict=False)]
        if stored != self._texts:
            stored_S = row_values(stored, self._next_S.device)
            self._position_S.copy_(stored_S)
            if self._steps is None:
                self._next_S.copy_(self._lengths.starts[:-1] + stored_S)
                self._lengths.seen_S.copy_(stored_S + 1)
            else:
                self._steps.step_S.copy_(stored_S - self._steps.first_S)
                self._look_up(self._steps)
        self._texts = [num + 1 for num in stored]  # after the step

    def advance(self) -> None:
        self._position_S += 1
        if self._steps is None:
            self._next_S.add_(1)
            self._lengths.seen_S.add_(1)
            return
        self._steps.step_S.add_(1).clamp_(max=len(self._steps.next_JS) - 1)  # after the last one there is none
        self._look_up(self._steps)

    def _look_up(self, steps: _Steps) -> None:
        """Where the next tokens are stored, and how many tokens they see here."""
        self._next_S.copy_(steps.next_JS.gather(0, steps.step_S[None])[0])
        self._lengths.seen_S.copy_(steps.seen_JS.gather(0, steps.step_S[None])[0])


@dataclass(kw_only=True)
class _Steps:
    """Slots of all new tokens of a shard, of which other stages store some, on the device.

    Attributes:
        next_JS: where each new token is stored; the last slot of a sequence if another stage stores it.
        seen_JS: tokens that it sees here, as `Lengths.seen_S`.
        first_S: number of tokens of each sequence's text before the first new one.
        step_S: number of the next new token of each.
    """

    next_JS: Tensor
    seen_JS: Tensor
    first_S: Tensor
    step_S: Tensor
