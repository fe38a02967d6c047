"""Keys of a prompt as factors of low rank, on the device (ShadowKV, Sun et al., ICML 2025, Sec. 3.1).

Before RoPE, the keys of all KV heads of a layer are close to a space of few dims. Factors of that rank stay; chosen
keys are rebuilt from them and rotated to their positions.
"""

# Legend: B batch, K kv heads, n prompt slots, m slots that are asked for, R rank, H key dim, Z = K x H.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from policies.precision import widened
from policies.retriever import PromptView

Turn = Callable[[Tensor, Tensor], Tensor]


class LowRankKeys:
    """Keys of a prompt as factors of low rank, before RoPE if rotations are known. Read-only.

    Args:
        view: the layer after the prompt.
        rank: R.
    """

    def __init__(self, view: PromptView, rank: int) -> None:
        self._turn, self.num_slots = view.turn, view.k_BKnH.shape[2]
        self._positions_BKn = view.positions_BKn.clone()
        positions_BKn = self._positions_BKn.expand(view.k_BKnH.shape[:3])
        is_token_BKn1 = (positions_BKn >= 0).unsqueeze(-1)
        k_BKnH = turned_by_head(view.turn, view.k_BKnH, -positions_BKn)
        k_BnZ = widened(torch.where(is_token_BKn1, k_BKnH, 0)).transpose(1, 2).flatten(2)
        # The right singular vectors are the eigenvectors of a Z x Z matrix, however long the prompt.
        basis_BZR = torch.linalg.eigh(k_BnZ.mT @ k_BnZ).eigenvectors[..., -rank:]
        self._factors_BnR = (k_BnZ @ basis_BZR).to(k_BKnH.dtype)
        self._basis_BKRH = basis_BZR.mT.unflatten(2, (k_BKnH.shape[1], -1)).transpose(1, 2).to(k_BKnH.dtype)

    @property
    def num_bytes(self) -> int:
        return self._factors_BnR.nbytes + self._basis_BKRH.nbytes + self._positions_BKn.nbytes

    def keys(self, slots_BKm: Tensor) -> Tensor:
        """Rotated keys (B, K, m, H) of some slots."""
        factors_BKnR = self._factors_BnR.unsqueeze(1).expand(-1, slots_BKm.shape[1], -1, -1)
        k_BKmH = factors_BKnR.take_along_dim(slots_BKm.unsqueeze(-1), dim=2) @ self._basis_BKRH
        positions_BKn = self._positions_BKn.expand(-1, slots_BKm.shape[1], -1)
        return turned_by_head(self._turn, k_BKmH, positions_BKn.take_along_dim(slots_BKm, dim=2))


def turned_by_head(turn: Turn | None, k_BKmH: Tensor, by_BKm: Tensor) -> Tensor:
    """Keys rotated by numbers of positions that may differ between heads; as they are if rotations are not known."""
    if turn is None:
        return k_BKmH
    return turn(k_BKmH.flatten(0, 1).unsqueeze(1), by_BKm.flatten(0, 1)).squeeze(1).unflatten(0, k_BKmH.shape[:2])
