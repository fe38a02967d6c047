"""Experts of a model: how many its layers choose among, to how many a token is sent, and which weights are theirs."""

# Legend: E experts, F width of one, D model dim.

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

NUMBER = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of a config for the number of experts of a layer."""

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
"""Names of a config for the number of experts that a token is sent to."""

LISTED = re.compile(r"(?:^|\.)experts\.(\d+)\.")
"""Name of a weight of one expert of a list."""

NAMED = re.compile(r"(?:^|\.)experts\.")
"""Name of a weight of experts, of a list or all of a layer."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts among which each layer that has some chooses for every token.

    Attributes:
        number: of a layer.
        chosen: number that a token is sent to.
        listed: weights of experts belong to one each.
    """

    number: int
    chosen: int
    listed: bool = False

    @classmethod
    def from_module(cls, module: nn.Module, config: PretrainedConfig, label: str) -> Experts | None:
        """The experts of a model; None if it has none.

        Raises:
            ValueError: its config does not say how many, or to how many a token is sent; it begins with `label`.
        """
        named = [(name, each.shape) for name, each in module.named_parameters() if NAMED.search(name)]
        listed = [int(found[1]) + 1 for name, _ in named if (found := LISTED.search(name))]
        number = max([*listed, *(shape[0] for _, shape in named if len(shape) == 3)], default=0)
        number = number or num_experts(config)
        matrices = [(name, shape[0]) for name, shape in named if len(shape) == 2 and not listed]
        flat = [name for name, size in matrices if number == 0 or size % number]
        if flat:
            raise ValueError(
                f"{label} has experts ({flat[0]}), and its config does not say how many by a name that is known "
                f"({', '.join(NUMBER)}); measure it with python -m partitioner.search"
            )
        experts = cls(number=number, chosen=_number(config, CHOSEN), listed=bool(listed))
        if not any(experts.own(name, owner, tuple(each.shape)) for name, owner, each in _owned(module)):
            return None
        if experts.chosen == 0:
            raise ValueError(
                f"{label} has experts, and its config does not say how many a token is sent to by a name that is "
                f"known ({', '.join(CHOSEN)}); measure it with python -m partitioner.search"
            )
        return experts

    @property
    def active(self) -> float:
        """Share of the experts that a token is sent to."""
        return min(1.0, self.chosen / self.number)

    def own(self, name: str, owner: nn.Module, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Shape of a parameter if experts are what it holds: of one, or (E, ...) of all of a layer; else None.

        Args:
            owner: module whose parameter it is.
        """
        if self.listed and LISTED.search(name):
            return tuple(shape)
        if self.number == 0 or isinstance(owner, nn.Conv1d):  # with one filter per channel, however many there are
            return None
        if len(shape) == 3 and (NAMED.search(name) or shape[0] == self.number):
            return tuple(shape)
        if len(shape) == 2 and NAMED.search(name) and shape[0] > self.number and shape[0] % self.number == 0:
            return self.number, shape[0] // self.number, shape[1]  # E * F x D: one below the other
        return None


def num_experts(config: PretrainedConfig) -> int:
    """Number of experts of a layer, as a config or one inside it says; 0 if it says none."""
    return _number(config, NUMBER)


def _number(config: PretrainedConfig, names: Sequence[str]) -> int:
    configs: list[Any] = [config, *(each for each in vars(config).values() if isinstance(each, PretrainedConfig))]
    numbers = (getattr(each, name, None) for each in configs for name in names)
    return next((int(each) for each in numbers if isinstance(each, int) and each > 0), 0)


def _owned(module: nn.Module) -> list[tuple[str, nn.Module, nn.Parameter]]:
    """Parameters with their names and the modules that own them."""
    return [
        (f"{prefix}.{name}" if prefix else name, owner, parameter)
        for prefix, owner in module.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
    ]
