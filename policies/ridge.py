"""Ridge regression in closed form, from samples that come a few at a time."""

# Legend: T samples, D inputs, K targets.

from __future__ import annotations

import torch
from torch import Tensor


class Ridge:
    """Sums of products of inputs and targets, in float64, and the linear map that they give.

    Args:
        num_inputs, num_targets: D and K.
        device: where sums are kept.
    """

    def __init__(self, num_inputs: int, num_targets: int, device: torch.device) -> None:
        self._count = 0
        self._sum_x_D, self._sum_y_K, self._xx_DD, self._xy_DK = (
            torch.zeros(shape, dtype=torch.float64, device=device)
            for shape in ((num_inputs,), (num_targets,), (num_inputs, num_inputs), (num_inputs, num_targets))
        )

    def add(self, x_TD: Tensor, y_TK: Tensor) -> None:
        """Add samples. Products of a few thousand are exact enough in float32, but not the sums of all."""
        x_TD, y_TK = x_TD.float(), y_TK.float()
        self._count += len(x_TD)
        self._sum_x_D += x_TD.double().sum(dim=0)
        self._sum_y_K += y_TK.double().sum(dim=0)
        self._xx_DD += (x_TD.mT @ x_TD).double()
        self._xy_DK += (x_TD.mT @ y_TK).double()

    def solved(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Weights (K, D) and biases (K), float32, that minimise the squared error and the penalised squared weights.

        Args:
            penalty: factor of the squared weights per sample, in units of the inputs' mean variance. Biases are free.
        """
        x_D, y_K = self._sum_x_D / self._count, self._sum_y_K / self._count
        covariance_DD = self._xx_DD / self._count - torch.outer(x_D, x_D)
        variance = covariance_DD.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        covariance_DD.diagonal().add_(penalty * variance)
        weight_DK = torch.linalg.solve(covariance_DD, self._xy_DK / self._count - torch.outer(x_D, y_K))
        return weight_DK.mT.float(), (y_K - x_D @ weight_DK).float()


def explained(y_TK: Tensor, predicted_TK: Tensor) -> float:
    """R²: share of the targets' variance around their means that predictions explain, of all targets together."""
    y_TK = y_TK.double()
    left = (y_TK - predicted_TK.double()).square().sum()
    return float(1 - left / (y_TK - y_TK.mean(dim=0)).square().sum())
