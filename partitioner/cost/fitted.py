"""Compute cost as polynomials, fitted to measured points or counted from a model's shape."""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from partitioner.cost.compute import FILE_NAMES, POINTS, check_num_places, check_seconds, check_states, parsed_fields
from partitioner.cost.measured import MeasuredCost

POWERS = {"first_s": 2, "between_s": 2, "own_s": 3, "prefix_s": 4, "last_s": 2, "state_s": 2}
"""Numbers of the coefficients of each polynomial."""
POLYNOMIALS = (*POWERS, "later_s")
"""All of them, the last of which may be missing: ()."""


@dataclass(frozen=True, kw_only=True)
class FittedCost:
    """Polynomials with coefficients in seconds, lowest power first, also for lengths far beyond the measured ones.

    Attributes:
        first_s, between_s, last_s, state_s: (1, c).
        later_s: as `state_s` after a prefix; () where it is the same.
        own_s: (1, c, c^2).
        prefix_s: (1, c, P, c P).
        states: as in `ComputeCost`.

    Raises:
        ValueError: a coefficient is missing, negative or not finite.
    """

    num_places: int
    first_s: tuple[float, float]
    between_s: tuple[float, float]
    own_s: tuple[float, float, float]
    prefix_s: tuple[float, float, float, float]
    last_s: tuple[float, float]
    state_s: tuple[float, float] = (0.0, 0.0)
    later_s: tuple[float, float] | tuple[()] = ()
    states: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_num_places(self.num_places)
        object.__setattr__(self, "states", check_states(self.states, self.num_places))
        for name, number in (POWERS | {"later_s": 0 if self.later_s in ((), []) else 2}).items():
            check_seconds(name, getattr(self, name), number)
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))

    def first(self, c: float) -> float:
        return self.first_s[0] + self.first_s[1] * c

    def between(self, c: float) -> float:
        return self.between_s[0] + self.between_s[1] * c

    def own(self, c: float) -> float:
        return self.own_s[0] + (self.own_s[1] + self.own_s[2] * c) * c

    def prefix(self, c: float, P: float) -> float:
        x = self.prefix_s
        return x[0] + x[1] * c + (x[2] + x[3] * c) * P if P > 0 else 0.0

    def state(self, c: float, P: float) -> float:
        x = (self.later_s if P > 0 else ()) or self.state_s
        return x[0] + x[1] * c

    def last(self, c: float) -> float:
        return self.last_s[0] + self.last_s[1] * c

    def as_json(self) -> dict[str, Any]:
        """The fields as they are in files."""
        return {FILE_NAMES.get(name, name): x for name, x in asdict(self).items() if x or name != "later_s"}

    def to_json(self) -> str:
        """The cost as JSON, which `from_json` reads."""
        return json.dumps(self.as_json())

    @classmethod
    def from_json(cls, text: str) -> FittedCost:
        """Read a cost that `to_json` wrote.

        Raises:
            ValueError: it is damaged; one line.
        """
        return cls(**parsed_fields(text, cls))

    @classmethod
    def fit(cls, measured: MeasuredCost) -> FittedCost:
        """Fit by non-negative least squares in relative errors, so that short chunks count as much as long ones."""
        fitted: dict[str, Any] = {}
        for name in (*POINTS, *(["later_s"] if measured.later_s else [])):
            c = np.array(list(getattr(measured, name)), dtype=float)
            powers = [np.ones_like(c), c, c**2] if name == "own_s" else [np.ones_like(c), c]
            fitted[name] = _nonnegative(np.column_stack(powers), list(getattr(measured, name).values()))
        grid = np.array([(1.0, c, P, c * P) for c, P in measured.prefix_s])
        fitted["prefix_s"] = _nonnegative(grid, list(measured.prefix_s.values()))
        return cls(num_places=measured.num_places, states=measured.states, **fitted)

    @classmethod
    def from_shape(
        cls,
        *,
        num_layers: int,
        model_dim: int,
        kv_dim: int,
        mlp_dim: float,
        vocab_size: float,
        matmul_flops: float,
        attention_flops: float,
        step_s: float = 0.0,
        batch: int = 1,
        query_dim: int | None = None,
    ) -> Self:
        """Cost of a decoder with a gated MLP, by counting its floating-point operations.

        After the last layer's keys and values comes the last token alone. Its attention is counted for all queries.

        Args:
            kv_dim: KV heads times their dim; equal to `model_dim` without grouped queries.
            matmul_flops, attention_flops: floating-point operations per second that the device sustains; a
                multiply-add is two.
            step_s: fixed overhead of each of first, between, own, prefix and last.
            query_dim: query heads times their dim; `model_dim` by default. One of t shares has 1/t of it, of `kv_dim`,
                `mlp_dim` and `vocab_size`.
        """
        query_dim = query_dim or model_dim
        qkv = 2 * batch * model_dim * (query_dim + 2 * kv_dim) / matmul_flops
        rest = 2 * batch * model_dim * (query_dim + 3 * mlp_dim) / matmul_flops
        pair = 4 * batch * query_dim / attention_flops  # per query and key: their product, and the weighted value
        logits = 2 * batch * model_dim * vocab_size / matmul_flops
        return cls(
            num_places=num_layers,
            first_s=(step_s, qkv),
            between_s=(step_s, rest + qkv),
            own_s=(step_s, 0.0, pair / 2),
            prefix_s=(step_s, 0.0, 0.0, pair),
            last_s=(step_s + logits + rest, 0.0),
        )


@dataclass(frozen=True, kw_only=True)
class WeightBoundCost(FittedCost):
    """Fitted cost in which matrix products take at least as long as reading the weights.

    Attributes:
        weight_tokens: tokens whose multiply-adds with a weight take as long as reading it.
    """

    weight_tokens: float = 0.0

    def first(self, c: float) -> float:
        return super().first(max(c, self.weight_tokens))

    def between(self, c: float) -> float:
        return super().between(max(c, self.weight_tokens))

    def last(self, c: float) -> float:
        return super().last(max(c, self.weight_tokens))


def _nonnegative(columns: np.ndarray, seconds: Sequence[float]) -> tuple[float, ...]:
    """Coefficients x >= 0 that minimise the relative error of columns @ x against the seconds.

    The optimum is the unconstrained least-squares solution on a subset of the columns; with at most four columns, all
    subsets are tried.
    """
    y = np.array(seconds, dtype=float)
    weights = 1.0 / np.maximum(y, 1e-9)
    scale = np.abs(columns * weights[:, None]).max(axis=0)  # columns differ by factors of up to 1e9
    weighted, target = columns * weights[:, None] / scale, y * weights
    best, best_error = np.zeros(columns.shape[1]), float(target @ target)
    for number in range(columns.shape[1], 0, -1):
        for chosen in itertools.combinations(range(columns.shape[1]), number):
            x, *_ = np.linalg.lstsq(weighted[:, chosen], target, rcond=None)
            error = float(np.square(weighted[:, chosen] @ x - target).sum())
            if (x >= 0).all() and error < best_error:
                best, best_error = np.zeros(columns.shape[1]), error
                best[list(chosen)] = x
    return tuple(float(value) for value in best / scale)
