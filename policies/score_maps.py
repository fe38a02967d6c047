"""Linear maps from what attention layers are given to scores of tokens, and the file that holds those of a model."""

# Legend: B batch, K kv heads, C tokens, D width of the attention input.

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from policies.model_file import ModelFiles, PathLike

FILES = ModelFiles(kind="runahead score maps 1", option="policy.predictor", program="policies.fit_kvzap")


@dataclass(frozen=True, kw_only=True)
class ScoreMaps:
    """A map for each layer that is not limited to a window.

    Attributes:
        weights: (K, D) in float32, by layer.
        biases: (K) in float32, by layer.
    """

    weights: dict[int, Tensor]
    biases: dict[int, Tensor]
    _placed: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def scores(self, layer: int, x_BCD: Tensor) -> Tensor:
        """Scores (B, K, C), at least float32, of the tokens that a layer's attention is given."""
        wide = torch.promote_types(x_BCD.dtype, torch.float32)
        place = layer, x_BCD.device, wide
        if place not in self._placed:
            self._placed[place] = (
                self.weights[layer].to(x_BCD.device, wide),
                self.biases[layer].to(x_BCD.device, wide),
            )
        return F.linear(x_BCD.to(wide), *self._placed[place]).transpose(1, 2)

    def of_share(self, share: int, num_shares: int) -> ScoreMaps:
        """The maps to a share of the KV heads, which ranks that share a model have in order, or copies of one."""

        def own(x_Kx: Tensor) -> Tensor:
            first = share * len(x_Kx) // num_shares
            return x_Kx[first : first + max(1, len(x_Kx) // num_shares)]

        return ScoreMaps(
            weights={layer: own(x_KD) for layer, x_KD in self.weights.items()},
            biases={layer: own(x_K) for layer, x_K in self.biases.items()},
        )

    def packed(self, fingerprint: str) -> bytes:
        """Content of a file for the model with this fingerprint."""
        weights = {f"layer.{layer}.weight": x_KD for layer, x_KD in self.weights.items()}
        biases = {f"layer.{layer}.bias": x_K for layer, x_K in self.biases.items()}
        return FILES.packed(weights | biases, fingerprint)

    @classmethod
    def load(cls, path: PathLike, fingerprint: str | None = None) -> ScoreMaps:
        """Read a file that `packed` made, for any model or for the one with this fingerprint.

        Raises:
            ValueError: as `ModelFiles.read`.
        """
        found, _ = FILES.read(path, fingerprint)
        names = [name.split(".") for name in found]
        layers = {int(name[1]) for name in names if len(name) == 3 and re.fullmatch(r"[0-9]{1,4}", name[1])}
        expected = {f"layer.{layer}.{part}" for layer in layers for part in ("weight", "bias")}
        if not layers or expected != found.keys():
            raise FILES.damaged(path)
        maps = cls(
            weights={layer: found[f"layer.{layer}.weight"] for layer in layers},
            biases={layer: found[f"layer.{layer}.bias"] for layer in layers},
        )
        if not all(_is_sound(maps.weights[layer], maps.biases[layer]) for layer in layers):
            raise FILES.damaged(path)
        return maps


def _is_sound(weight_KD: Tensor, bias_K: Tensor) -> bool:
    if weight_KD.ndim != 2 or weight_KD.numel() == 0 or bias_K.shape != weight_KD.shape[:1]:
        return False
    return all(x.dtype == torch.float32 and bool(x.isfinite().all()) for x in (weight_KD, bias_K))
