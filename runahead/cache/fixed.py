"""The KV cache of decoding in tensors of fixed shape: how many tokens are stored is a number on the device.

So a decoding step is the same operations on the same tensors every time, and a GPU can replay it as one graph.

Rows of a batch without padding lie in the slab as one sequence with the heads of all rows side by side. Rows with
padding are moved, without it, into sequences of their own. Either way one call attends to all of them.
"""

# Legend: B batch, N query heads, K kv heads, S sequences, U heads of a sequence, T tokens, X = H + V (key and value).

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.attention.causal import nothing
from runahead.attention.partial import AttentionTerms, attend_sequences, takes_sequences
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVSlab
from runahead.report import RankReport


@dataclass(kw_only=True)
class Lengths:
    """Where the tokens of each sequence are, on the device; the same for all layers.

    Attributes:
        starts: index of each sequence's first token, and the end of the last (S + 1, int32).
        next_S: index where the next token is stored (int64).
        seen_S: tokens that the next token sees, with itself (int32).
        room: most tokens of a sequence.
    """

    starts: Tensor
    next_S: Tensor
    seen_S: Tensor
    room: int


@dataclass(kw_only=True)
class SeenSequences(SeenKV):
    """Sequences together with the query of each one's newest token."""

    kv_TUX: Tensor
    key_dim: int
    lengths: Lengths

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> tuple[Tensor, Tensor]:
        q, lengths = self.q_BNCH, self.lengths
        out, lse = attend_sequences(
            q.reshape(len(lengths.seen_S), -1, q.shape[-1]),
            self.kv_TUX[..., : self.key_dim],
            self.kv_TUX[..., self.key_dim :],
            starts=lengths.starts,
            used_S=lengths.seen_S,
            longest=lengths.room,
            scaling=terms.scaling,
        )
        return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


@dataclass(kw_only=True)
class FixedLayer(LayerStore):
    """One layer: the tokens of all sequences, one sequence after another."""

    kv_TUX: Tensor
    key_dim: int
    lengths: Lengths

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        new_SUX = torch.cat([k_BKCH, v_BKCV], dim=-1).reshape(len(self.lengths.next_S), *self.kv_TUX.shape[1:])
        self.kv_TUX.index_copy_(0, self.lengths.next_S, new_SUX)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenSequences:
        return SeenSequences(q_BNCH=q_BNCH, kv_TUX=self.kv_TUX, key_dim=self.key_dim, lengths=self.lengths)

    @property
    def num_bytes(self) -> int:
        return self.kv_TUX.nbytes


class FixedCache(KVStore):
    """A prompt's KV cache for decoding, one token per row and step. Call `advance` after each step.

    Args:
        cache: the prompt's; its slabs are taken over.
        pads: left padding per row.
        num_tokens: of the padded prompt.

    Raises:
        ValueError: there is no memory in which to move padded rows.
    """

    def __init__(self, cache: KVCache, *, pads: Sequence[int], num_tokens: int) -> None:
        device, batch = cache.device, len(pads)
        room = min(layer.slab.end for layer in cache.layers)
        stored = [num_tokens - pad for pad in pads] if any(pads) else [num_tokens]
        starts, stored_S = torch.arange(len(stored) + 1) * room, torch.tensor(stored)
        self.lengths = Lengths(
            starts=starts.to(device, torch.int32),
            next_S=(starts[:-1] + stored_S).to(device),
            seen_S=(stored_S + 1).to(device, torch.int32),
            room=room,
        )
        self._batch = batch
        layers: list[FixedLayer] = []
        for layer in cache.take_layers():
            slab = layer.slab
            kv_TUX = slab.slab_TBKX.flatten(1, 2) if len(stored) == 1 else _by_row(slab, pads, num_tokens, room)
            layers.append(FixedLayer(kv_TUX=kv_TUX, key_dim=slab.key_dim, lengths=self.lengths))
        self.layers = layers

    @staticmethod
    def takes(cache: KVStore) -> bool:
        """Whether a cache can be taken over: slabs of all tokens, on a device with a kernel for sequences."""
        return (
            type(cache) is KVCache
            and not cache.rotates
            and cache.num_slabs == cache.num_layers
            and all(first == 0 for first, _ in cache.spans)
            and all(
                takes_sequences(cache.device, shape.dtype, shape.key_dim, shape.value_dim) for shape in cache.shapes
            )
        )

    def positions_BC(self, index_C: Tensor) -> Tensor:  # noqa: N802
        return (self.lengths.seen_S.long() - 1).expand(self._batch)[:, None]

    def describe_decoding(self, report: RankReport) -> None:
        super().describe_decoding(report)
        if len(self.lengths.next_S) > 1:  # a layer is there twice while its rows are moved
            report.kv_peak_bytes = max(
                report.kv_peak_bytes, self.num_bytes + max(layer.num_bytes for layer in self.layers)
            )

    def advance(self) -> None:
        """Count the token that all layers have appended."""
        self.lengths.next_S += 1
        self.lengths.seen_S += 1


def _by_row(slab: KVSlab, pads: Sequence[int], num_tokens: int, room: int) -> Tensor:
    """The rows of a slab one after another (B * room, K, X), each from its first token on."""
    try:
        rows_BTKX = slab.slab_TBKX.new_empty(len(pads), room, *slab.slab_TBKX.shape[2:])
    except RuntimeError as error:  # torch.OutOfMemoryError on GPUs, a plain RuntimeError on CPUs
        raise ValueError(
            f"{slab.slab_TBKX.nbytes:,} bytes to move rows of different lengths for decoding do not fit on "
            f"{slab.slab_TBKX.device}; use a smaller prompt.batch, or prompts of equal length"
        ) from error
    for row, pad in enumerate(pads):
        rows_BTKX[row, : num_tokens - pad] = slab.slab_TBKX[pad:num_tokens, row]
    return rows_BTKX.flatten(0, 1)
