"""The part of a weight that this rank has, where ranks share the model: torch's `DTensor` says which."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_laid_out(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is laid out over ranks.

    Where nothing has imported torch's module, which takes a quarter of a second, there is none.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(weight: Tensor) -> Tensor:
    """This rank's part of a weight, which is all of it where the plan does not split it."""
    return weight.to_local() if is_laid_out(weight) else weight
