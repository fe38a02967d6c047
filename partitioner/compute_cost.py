"""Seconds of compute that one device needs for a chunk of c tokens behind a prefix of P tokens.

All layers are alike, and every query attends to all keys before it (no sliding window). Costs are of the device that
was measured, with its batch; another device's speed is a factor of the `Cluster`.
"""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np

POINTS = ("first_s", "between_s", "own_s", "last_s")
"""What is measured per chunk length."""


class ComputeCost(Protocol):
    """Seconds of each step of a rank's forward. A rank runs
    first, then per layer own and prefix with `between` from one layer to the next, and the last rank `last`."""

    @property
    def num_layers(self) -> int: ...

    def first(self, c: float) -> float:
        """Embedding, norm and projections of layer 0, until its K,V are known."""

    def between(self, c: float) -> float:
        """From one attention to the next: output projection, MLP, and norm and projections of the next layer."""

    def own(self, c: float) -> float:
        """Causal attention of the chunk to itself in one layer."""

    def prefix(self, c: float, P: float) -> float:
        """Attention of the chunk to its prefix in one layer, merging included; 0 without a prefix."""

    def last(self, c: float) -> float:
        """After the last attention: output projection, MLP, norm, and the logits of one token."""


def layer_s(cost: ComputeCost, c: float, P: float) -> float:
    """Seconds per layer of a rank in the middle of its work."""
    return cost.between(c) + cost.own(c) + cost.prefix(c, P)


def rank_s(cost: ComputeCost, c: float, P: float, *, is_last: bool) -> float:
    """Seconds of all that one rank computes: ranks before the last stop once the last layer's K,V are known."""
    num_attended = cost.num_layers if is_last else cost.num_layers - 1
    attention_s = num_attended * (cost.own(c) + cost.prefix(c, P))
    return cost.first(c) + (cost.num_layers - 1) * cost.between(c) + attention_s + (cost.last(c) if is_last else 0.0)


@dataclass(kw_only=True)
class MeasuredCost:
    """Interpolates measured points.

    `first`, `between` and `last` are piecewise linear in c, own(c) / c too (hence own is piecewise quadratic), and
    `prefix` is piecewise bilinear in c and P. Outside the points the nearest piece goes on, never falling beyond the
    last point, never below zero.

    Attributes:
        num_layers: layers of the model that is planned for; layers are alike, so fewer may have been measured.
        first_s, between_s, own_s, last_s: chunk length -> seconds; the same lengths in all four.
        prefix_s: (chunk length, prefix length) -> seconds, on a grid. A point that is missing because c + P was too
            long to measure continues the two before it in its row and in its column.

    Raises:
        ValueError: points are missing, negative or not finite.
    """

    num_layers: int
    first_s: dict[int, float]
    between_s: dict[int, float]
    own_s: dict[int, float]
    last_s: dict[int, float]
    prefix_s: dict[tuple[int, int], float]

    def __post_init__(self) -> None:
        _check_layers(self.num_layers)
        for name in POINTS:
            points = getattr(self, name)
            _check_lengths(name, list(points))
            _check_seconds(name, list(points.values()))
            if set(points) != set(self.first_s):
                raise ValueError(
                    f"compute cost: {name} has the chunks {sorted(points)} but first_s {sorted(self.first_s)}"
                )
        _check_seconds("prefix_s", list(self.prefix_s.values()))
        self._chunks = sorted(self.first_s)
        self._prefix_chunks = sorted({c for c, _ in self.prefix_s})
        self._prefixes = sorted({P for _, P in self.prefix_s})
        _check_lengths("prefix_s", self._prefix_chunks)
        _check_lengths("prefix_s", self._prefixes)
        self._first, self._between, self._last = (
            [points[c] for c in self._chunks] for points in (self.first_s, self.between_s, self.last_s)
        )
        self._own_per_token = [self.own_s[c] / c for c in self._chunks]
        self._prefix = self._without_gaps()

    def first(self, c: float) -> float:
        return _line(self._chunks, self._first, c)

    def between(self, c: float) -> float:
        return _line(self._chunks, self._between, c)

    def own(self, c: float) -> float:
        return c * _line(self._chunks, self._own_per_token, c)

    def prefix(self, c: float, P: float) -> float:
        if P <= 0:
            return 0.0
        row = _piece(self._prefix_chunks, c)
        ends = [_line(self._prefixes, self._prefix[at], P) for at in (row, row + 1)]
        return _line(self._prefix_chunks[row : row + 2], ends, c)

    def last(self, c: float) -> float:
        return _line(self._chunks, self._last, c)

    def to_json(self) -> str:
        """What `from_json` reads."""
        values: dict[str, Any] = {"num_layers": self.num_layers}
        values |= {name: sorted(getattr(self, name).items()) for name in POINTS}
        values["prefix_s"] = [[c, P, seconds] for (c, P), seconds in sorted(self.prefix_s.items())]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> MeasuredCost:
        """The cost that was written.

        Raises:
            ValueError: one line that says what is wrong.
        """
        values = _parsed(text, cls)
        for name, width in (*((name, 2) for name in POINTS), ("prefix_s", 3)):
            rows = values[name]
            if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) != width for row in rows):
                raise ValueError(f"compute cost: {name} must be a list of rows of {width} numbers")
            try:
                values[name] = {row[0] if width == 2 else (row[0], row[1]): row[-1] for row in rows}
            except TypeError as error:
                raise ValueError(f"compute cost: {name} holds a length that is not a number") from error
        return cls(**values)

    def _without_gaps(self) -> list[list[float]]:
        """prefix_s as rows of a grid."""
        rows: list[list[float]] = []
        for i, c in enumerate(self._prefix_chunks):
            rows.append([])
            for j, P in enumerate(self._prefixes):
                seconds = self.prefix_s.get((c, P))
                if seconds is None:
                    guesses = []
                    if j >= 2:
                        guesses.append(_line(self._prefixes[j - 2 : j], rows[i][j - 2 : j], P))
                    if i >= 2:
                        above = [rows[i - 2][j], rows[i - 1][j]]
                        guesses.append(_line(self._prefix_chunks[i - 2 : i], above, c))
                    if not guesses:
                        raise ValueError(
                            f"compute cost: prefix_s of a chunk of {c} tokens behind {P} is missing, and so are the "
                            "points that it could be continued from; measure it"
                        )
                    seconds = sum(guesses) / len(guesses)
                rows[i].append(seconds)
        return rows


@dataclass(frozen=True, kw_only=True)
class FittedCost:
    """Polynomials with coefficients in seconds, lowest power first, for lengths far beyond what was measured.

    Attributes:
        first_s, between_s, last_s: (1, c).
        own_s: (1, c, c^2).
        prefix_s: (1, c, P, c P).

    Raises:
        ValueError: a coefficient is missing, negative or not finite.
    """

    num_layers: int
    first_s: tuple[float, float]
    between_s: tuple[float, float]
    own_s: tuple[float, float, float]
    prefix_s: tuple[float, float, float, float]
    last_s: tuple[float, float]

    def __post_init__(self) -> None:
        _check_layers(self.num_layers)
        for name, number in (("first_s", 2), ("between_s", 2), ("own_s", 3), ("prefix_s", 4), ("last_s", 2)):
            _check_seconds(name, getattr(self, name), number)
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

    def last(self, c: float) -> float:
        return self.last_s[0] + self.last_s[1] * c

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FittedCost:
        """The cost that was written.

        Raises:
            ValueError: one line that says what is wrong.
        """
        return cls(**_parsed(text, cls))

    @classmethod
    def fit(cls, measured: MeasuredCost) -> FittedCost:
        """Non-negative least squares in relative errors, so that short chunks count as much as long ones."""
        fitted: dict[str, Any] = {}
        for name in POINTS:
            c = np.array(list(getattr(measured, name)), dtype=float)
            powers = [np.ones_like(c), c, c**2] if name == "own_s" else [np.ones_like(c), c]
            fitted[name] = _nonnegative(np.column_stack(powers), list(getattr(measured, name).values()))
        grid = np.array([(1.0, c, P, c * P) for c, P in measured.prefix_s])
        fitted["prefix_s"] = _nonnegative(grid, list(measured.prefix_s.values()))
        return cls(num_layers=measured.num_layers, **fitted)

    @classmethod
    def from_shape(
        cls,
        *,
        num_layers: int,
        model_dim: int,
        kv_dim: int,
        mlp_dim: int,
        vocab_size: int,
        matmul_flops: float,
        attention_flops: float,
        step_s: float = 0.0,
        dense: bool = False,
        batch: int = 1,
    ) -> FittedCost:
        """A decoder with a gated MLP, by counting its multiplications: what a datasheet says of a device.

        Args:
            kv_dim: K (or V) heads times their dim; equal to `model_dim` without grouped queries.
            matmul_flops, attention_flops: floating-point operations per second that the device sustains; a
                multiply-add is two.
            step_s: fixed overhead of each of first, between, own, prefix and last.
            dense: the masked half of the own attention is computed as well, as the paper's baseline does.
        """
        qkv = 2 * batch * model_dim * (model_dim + 2 * kv_dim) / matmul_flops
        rest = 2 * batch * model_dim * (model_dim + 3 * mlp_dim) / matmul_flops
        pair = 4 * batch * model_dim / attention_flops  # a query and a key: their product, and the weighted value
        logits = 2 * batch * model_dim * vocab_size / matmul_flops
        return cls(
            num_layers=num_layers,
            first_s=(step_s, qkv),
            between_s=(step_s, rest + qkv),
            own_s=(step_s, 0.0, pair if dense else pair / 2),
            prefix_s=(step_s, 0.0, 0.0, pair),
            last_s=(step_s + logits, rest),
        )


def fit_errors(fitted: ComputeCost, measured: MeasuredCost) -> dict[str, float]:
    """Largest relative error at the measured points, per step: "first", "between", "own", "last", "prefix"."""
    steps: dict[str, Callable[[float], float]] = {
        "first_s": fitted.first,
        "between_s": fitted.between,
        "own_s": fitted.own,
        "last_s": fitted.last,
    }
    errors = {
        name.removesuffix("_s"): max(_relative(step(c), seconds) for c, seconds in getattr(measured, name).items())
        for name, step in steps.items()
    }
    errors["prefix"] = max(_relative(fitted.prefix(c, P), seconds) for (c, P), seconds in measured.prefix_s.items())
    return errors


def _relative(value: float, truth: float) -> float:
    return abs(value - truth) / max(truth, 1e-12)


def _piece(xs: Sequence[float], x: float) -> int:
    """Index of the point at which the piece that holds x begins."""
    return min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through (xs, ys); beyond the last point it does not fall; never negative."""
    at = _piece(xs, x)
    low, high = ys[at], ys[at + 1]
    if x > xs[-1]:
        high = max(low, high)
        if high == low:
            return max(0.0, ys[-1])
    weight = (x - xs[at]) / (xs[at + 1] - xs[at])
    return max(0.0, (1.0 - weight) * low + weight * high)


def _nonnegative(columns: np.ndarray, seconds: Sequence[float]) -> tuple[float, ...]:
    """Coefficients x >= 0 that minimise the relative error of columns @ x against the seconds.

    The optimum is the plain least-squares solution on some of the columns; there are at most four, so all are tried.
    """
    y = np.array(seconds, dtype=float)
    weights = 1.0 / np.maximum(y, 1e-9)
    scale = np.abs(columns * weights[:, None]).max(axis=0)  # c P is a billion times 1
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


def _check_layers(num_layers: object) -> None:
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"compute cost: num_layers={num_layers!r} must be a whole number of at least 1")


def _check_lengths(name: str, lengths: list[Any]) -> None:
    if len(lengths) < 2 or any(type(length) is not int or length < 1 for length in lengths):
        raise ValueError(
            f"compute cost: {name} has the lengths {lengths}, but at least two are needed, in whole tokens"
        )


def _check_seconds(name: str, seconds: Any, number: int | None = None) -> None:
    if not isinstance(seconds, list | tuple) or number not in (None, len(seconds)):
        raise ValueError(f"compute cost: {name}={seconds!r} must be {number} numbers of seconds")
    for value in seconds:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"compute cost: {name} holds {value!r}, which is no number of seconds")


def _parsed(text: str, kind: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass from JSON."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"compute cost is not JSON: {error}") from error
    names = {each.name for each in fields(kind)}
    if not isinstance(values, dict) or set(values) != names:
        got = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"compute cost must have the fields {sorted(names)}, not {got}")
    return values
