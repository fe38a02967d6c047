"""Compute cost interpolated between points that were measured on one device."""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from partitioner.cost.compute import FILE_NAMES, POINTS, check_num_places, check_seconds, check_states, parsed_fields


@dataclass(kw_only=True)
class MeasuredCost:
    """Interpolation of measured points.

    `first`, `between`, `last`, `state` and own(c) / c are piecewise linear in c (so `own` is piecewise quadratic), and
    `prefix` is piecewise bilinear in c and P. Outside the points the nearest piece is extrapolated, but does not
    decrease beyond the last point and is never below zero.

    Attributes:
        num_places, states: of the model to plan for; places of a kind are alike, so fewer may have been measured.
        first_s, between_s, own_s, last_s, state_s: seconds by chunk length; the same lengths in all, but for `state_s`,
            which is empty where no place holds a state.
        later_s: as `state_s` after a prefix; empty where it is the same.
        prefix_s: seconds by (chunk length, prefix length), on a grid. A point that is missing because c + P was too
            long to measure is extrapolated from the two before it in its row and in its column.

    Raises:
        ValueError: points are missing, negative or not finite.
    """

    num_places: int
    first_s: dict[int, float]
    between_s: dict[int, float]
    own_s: dict[int, float]
    last_s: dict[int, float]
    prefix_s: dict[tuple[int, int], float]
    state_s: dict[int, float] = field(default_factory=dict)
    later_s: dict[int, float] = field(default_factory=dict)
    states: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_num_places(self.num_places)
        self.states = check_states(self.states, self.num_places)
        if not self.states and not self.state_s:
            self.state_s = dict.fromkeys(self.first_s, 0.0)
        for name in (*POINTS, *(["later_s"] if self.later_s else [])):
            points = getattr(self, name)
            _check_lengths(name, list(points))
            check_seconds(name, list(points.values()))
            if set(points) != set(self.first_s):
                raise ValueError(
                    f"compute cost: {name} has the chunks {sorted(points)} but first_s {sorted(self.first_s)}"
                )
        check_seconds("prefix_s", list(self.prefix_s.values()))
        _check_lengths("prefix_s", [c for c, _ in self.prefix_s])
        _check_lengths("prefix_s", [P for _, P in self.prefix_s])
        self._chunks = sorted(self.first_s)
        self._prefix_chunks = sorted({c for c, _ in self.prefix_s})
        self._prefixes = sorted({P for _, P in self.prefix_s})
        _check_lengths("prefix_s", self._prefix_chunks)
        _check_lengths("prefix_s", self._prefixes)
        self._first, self._between, self._last, self._state = (
            [points[c] for c in self._chunks] for points in (self.first_s, self.between_s, self.last_s, self.state_s)
        )
        self._later = [self.later_s[c] for c in self._chunks] if self.later_s else self._state
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

    def state(self, c: float, P: float) -> float:
        return _line(self._chunks, self._later if P > 0 else self._state, c)

    def last(self, c: float) -> float:
        return _line(self._chunks, self._last, c)

    def to_json(self) -> str:
        """The cost as JSON, which `from_json` reads."""
        values: dict[str, Any] = {FILE_NAMES["num_places"]: self.num_places, "states": self.states}
        values |= {name: sorted(getattr(self, name).items()) for name in POINTS}
        values |= {"later_s": sorted(self.later_s.items())} if self.later_s else {}
        values["prefix_s"] = [[c, P, seconds] for (c, P), seconds in sorted(self.prefix_s.items())]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> MeasuredCost:
        """Read a cost that `to_json` wrote.

        Raises:
            ValueError: it is damaged; one line.
        """
        values = parsed_fields(text, cls)
        for name, width in (*((name, 2) for name in (*POINTS, "later_s")), ("prefix_s", 3)):
            rows = values.get(name, [])
            if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) != width for row in rows):
                raise ValueError(f"compute cost: {name} must be a list of rows of {width} numbers")
            try:
                values[name] = {row[0] if width == 2 else (row[0], row[1]): row[-1] for row in rows}
            except TypeError as error:
                raise ValueError(f"compute cost: {name} holds a length that is not a number") from error
        return cls(**values)

    def _without_gaps(self) -> list[list[float]]:
        """`prefix_s` as rows of a grid, with missing points extrapolated."""
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
                            f"compute cost: prefix_s of a chunk of {c} tokens after {P} is missing, and so are the "
                            "points that it could be extrapolated from; measure it"
                        )
                    seconds = sum(guesses) / len(guesses)
                rows[i].append(seconds)
        return rows


def _piece(xs: Sequence[float], x: float) -> int:
    """Index of the point at which the piece that contains x begins."""
    return min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear interpolation of (xs, ys) at x; never negative, and not decreasing beyond the last point."""
    at = _piece(xs, x)
    low, high = ys[at], ys[at + 1]
    if x > xs[-1]:
        high = max(low, high)
        if high == low:
            return max(0.0, ys[-1])
    weight = (x - xs[at]) / (xs[at + 1] - xs[at])
    return max(0.0, (1.0 - weight) * low + weight * high)


def _check_lengths(name: str, lengths: list[Any]) -> None:
    if len(lengths) < 2 or any(type(length) is not int or length < 1 for length in lengths):
        raise ValueError(
            f"compute cost: {name} has the lengths {lengths}, but at least two are needed, in whole tokens"
        )
