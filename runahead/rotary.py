"""Rotary position embeddings (RoPE) computed by the runtime, and checked to equal those of the model's own code.

At position 0 the rotation is the identity. So a model that is given position 0 for every token returns queries and keys
as they are before RoPE, including any scale of its tables, and the runtime rotates them to any position. Each key is
rotated once: a stored key is never rotated back, so rounding errors do not add up.
"""

# Legend: T tokens, B batch, N heads, X head dim, F frequencies, of which each turns two of the head's dims.

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from policies.row_values import row_values


class Rotary:
    """Rotation of queries and keys in one layer.

    Args:
        inv_freq_F: radians per position; empty for a layer without positions.
        interleaved: whether dims are paired as 2i with 2i + 1 (Cohere, GLM) rather than i with i + F (Llama).
        first: first of the head's dims that is rotated.
    """

    def __init__(self, inv_freq_F: Tensor, interleaved: bool = False, first: int = 0) -> None:
        self.inv_freq_F, self.interleaved, self.first = inv_freq_F, interleaved, first
        self._tables: tuple[Tensor, Tensor] | None = None
        self._step: tuple[tuple[int, tuple[int, ...], torch.dtype], Tensor, Tensor, Tensor] | None = None

    def rotated(self, x_TBNX: Tensor, start: int, pads: Sequence[int]) -> Tensor:
        """Rotate the tokens [start, start + T) of a left-padded batch to their positions in their rows.

        Returns:
            (T, B, N, X) in new memory, in the dtype of `x_TBNX`; padding is at position 0.
        """
        num_freqs, end = len(self.inv_freq_F), start + x_TBNX.shape[0]
        out_TBNX = x_TBNX.clone(memory_format=torch.contiguous_format)
        if num_freqs == 0 or out_TBNX.numel() == 0:
            return out_TBNX
        # As in transformers, tables are in at least float32, whatever the model's dtype.
        cos_LF, sin_LF = self._cos_sin(end, torch.promote_types(x_TBNX.dtype, torch.float32), x_TBNX.device)
        if any(pads) and len(set(pads)) == 1:  # those at position 0, of which there may be many, stay as they are
            (pad,) = set(pads)
            skipped = min(max(0, pad - start), x_TBNX.shape[0])
            cos, sin = (x_LF[start + skipped - pad : end - pad, None, None] for x_LF in (cos_LF, sin_LF))
            self._rotate(x_TBNX[skipped:], cos, sin, out_TBNX[skipped:])
            return out_TBNX
        if any(pads):
            slots_T1 = torch.arange(start, end, device=x_TBNX.device)[:, None]
            index_TB = (slots_T1 - row_values(pads, x_TBNX.device)).clamp_min(0)
            cos, sin = cos_LF[index_TB][:, :, None], sin_LF[index_TB][:, :, None]
        else:
            cos, sin = cos_LF[start:end, None, None], sin_LF[start:end, None, None]
        return self._rotate(x_TBNX, cos, sin, out_TBNX)

    def rotated_token(self, x_BNX: Tensor, start: int, pads: Sequence[int]) -> Tensor:
        """As `rotated`, for one token per row, (B, N, X), with three operations on tables for whole heads."""
        if len(self.inv_freq_F) == 0:
            return x_BNX
        asked = start, tuple(pads), x_BNX.dtype
        if self._step is None or self._step[0] != asked:
            self._step = asked, *self._whole_heads(x_BNX, start, pads)
        _, cos_BNX, sin_BNX, partner_X = self._step
        return (x_BNX * cos_BNX).addcmul_(x_BNX.index_select(-1, partner_X), sin_BNX)

    def _whole_heads(self, x_BNX: Tensor, start: int, pads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Factors (B or 1, 1, X) of each dim and of its partner in the rotation, and the partners' indices (X)."""
        width, device = x_BNX.shape[-1], x_BNX.device
        ones_1B1X = torch.ones(1, len(pads) if any(pads) else 1, 1, width, dtype=x_BNX.dtype, device=device)
        # Pairs of (1, 0) are rotated to (cos, sin).
        first_1B1X = ones_1B1X.clone()
        self.paired(first_1B1X)[1].zero_()
        rows = pads if any(pads) else [0]
        turned_1B1X = self.rotated(first_1B1X, start, rows)
        cos_1B1X, sin_1B1X = ones_1B1X.clone(), torch.zeros_like(ones_1B1X)
        cos, sin = self.paired(turned_1B1X)
        for part in self.paired(cos_1B1X):
            part.copy_(cos)
        to_a, to_b = self.paired(sin_1B1X)
        to_a.copy_(-sin)
        to_b.copy_(sin)
        partner_X = torch.arange(width, device=device)
        a_X, b_X = self.paired(torch.arange(width, device=device))
        partner_X[a_X], partner_X[b_X] = b_X, a_X
        return cos_1B1X[0], sin_1B1X[0], partner_X

    def turned(self, x_BNCX: Tensor, by_BC: Tensor) -> Tensor:
        """Rotate heads (B, N, C, X) by `by_BC` further positions; rotations add up."""
        if len(self.inv_freq_F) == 0:
            return x_BNCX
        wide = torch.promote_types(x_BNCX.dtype, torch.float32)
        angles_B1CF = by_BC[:, None, :, None].to(wide) * self.inv_freq_F.to(device=x_BNCX.device, dtype=wide)
        return self._rotate(x_BNCX, angles_B1CF.cos(), angles_B1CF.sin(), x_BNCX.clone())

    def turned_by_mean(self, x_BNCX: Tensor, start_B: Tensor, num_positions: int) -> Tensor:
        """Turn heads (B, N, C, X) by the mean of the rotations to the next positions of each row, from `start_B` on."""
        if len(self.inv_freq_F) == 0:
            return x_BNCX
        wide = torch.promote_types(x_BNCX.dtype, torch.float32)
        positions_BP = start_B[:, None] + torch.arange(num_positions, device=x_BNCX.device)
        angles_BPF = positions_BP[..., None].to(wide) * self.inv_freq_F.to(device=x_BNCX.device, dtype=wide)
        cos_B11F, sin_B11F = (x_BPF.mean(dim=1)[:, None, None] for x_BPF in (angles_BPF.cos(), angles_BPF.sin()))
        return self._rotate(x_BNCX, cos_B11F, sin_B11F, x_BNCX.clone())

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
        """Write the rotated pairs of `x` to `out`, a copy of it; `cos` and `sin` are (..., F)."""
        (a, b), (to_a, to_b) = self.paired(x), self.paired(out)
        to_a.copy_(a * cos - b * sin)
        to_b.copy_(b * cos + a * sin)
        return out

    def paired(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second dim of every pair, (..., F) each, as views."""
        num_freqs = len(self.inv_freq_F)
        turned = x[..., self.first : self.first + 2 * num_freqs]
        if self.interleaved:
            return turned[..., 0::2], turned[..., 1::2]
        return turned[..., :num_freqs], turned[..., num_freqs:]

    def _cos_sin(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tables (at least `length`, F), computed again only for longer texts."""
        if self._tables is None or self._tables[0].shape[0] < length or self._tables[0].dtype != dtype:
            positions_L = torch.arange(length + length // 4, dtype=dtype, device=device)
            angles_LF = positions_L[:, None] * self.inv_freq_F.to(device=device, dtype=dtype)
            self._tables = angles_LF.cos(), angles_LF.sin()
        return self._tables


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values (1, N or K, 1, X) of one token in one layer."""


def find_rotaries(module: nn.Module, heads_at: Callable[[int], list[Heads]], last_position: int) -> list[Rotary]:
    """Find the rotation of each layer of a model from its heads for one token at several positions.

    Frequencies are those of the model's rotary modules. For each layer the frequencies, dims and pairs are chosen that
    give the model's own queries and keys at all of these positions.

    Args:
        heads_at: position -> one token's heads in every layer. They must not depend on the output of attention.
        last_position: largest position that will be used.

    Raises:
        ValueError: a layer uses positions in any other way; the message says how, but does not name the model.
    """
    frequencies = [
        inv_freq for name, inv_freq in module.named_buffers() if name.endswith("inv_freq") and "original" not in name
    ]
    positions = sorted({1, 2, last_position})
    at_0, others = heads_at(0), [heads_at(position) for position in positions]
    rotaries: list[Rotary] = []
    candidates: dict[int, list[Rotary]] = {}  # by head dim: layers that rotate alike share their tables
    for layer, (q, k, v) in enumerate(at_0):
        seen = [(position, heads[layer]) for position, heads in zip(positions, others, strict=True)]
        if not all(torch.allclose(v, other[2], rtol=rounding(v.dtype)) for _, other in seen):
            raise ValueError("adds positions to its hidden states")
        fitting = (
            rotary
            for rotary in candidates.setdefault(q.shape[-1], _candidates(frequencies, q.shape[-1]))
            if all(_turns(rotary, x, other[i], position) for position, other in seen for i, x in ((0, q), (1, k)))
        )
        rotary = next(fitting, None)
        if rotary is None:
            raise ValueError("does not turn queries and keys by angles that are proportional to positions")
        rotaries.append(rotary)
    return rotaries


def _candidates(frequencies: list[Tensor], head_dim: int) -> list[Rotary]:
    found = [Rotary(torch.empty(0))]
    for inv_freq_F in frequencies:
        if 2 * inv_freq_F.numel() <= head_dim and inv_freq_F.ndim == 1:
            firsts = sorted({0, head_dim - 2 * len(inv_freq_F)})
            found += [Rotary(inv_freq_F, interleaved, first) for first in firsts for interleaved in (False, True)]
    return found


def _turns(rotary: Rotary, x_1N1X: Tensor, expected_1N1X: Tensor, position: int) -> bool:
    """Whether rotating the heads at position 0 gives the heads at another position, up to rounding."""
    x_TBNX, expected_TBNX = x_1N1X.permute(2, 0, 1, 3), expected_1N1X.permute(2, 0, 1, 3)
    # Relative to the dims of the pair: in some models dims are hundreds of times as large as others.
    scale_TBNX = x_TBNX.abs()
    a, b = rotary.paired(scale_TBNX)
    both = a + b
    a.copy_(both)
    b.copy_(both)
    off_TBNX = (rotary.rotated(x_TBNX, position, [0]) - expected_TBNX).abs()
    return bool((off_TBNX <= rounding(x_TBNX.dtype) * scale_TBNX).all())


def rounding(dtype: torch.dtype) -> float:
    """Relative error allowed for rounding; that of a wrong frequency or pair is about 1."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.05
