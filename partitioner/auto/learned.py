"""File in which a run keeps what it learned of a model's split on this machine, for the next run."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partitioner.auto.alone import SeenTime
from partitioner.auto.balance import Balance
from partitioner.auto.slowness import SeenPrompt, Slowness
from partitioner.cost.fitted import POLYNOMIALS, FittedCost
from partitioner.cost.link import Link
from runahead.failures import first_line
from runahead.files import read_user_file, write_whole

FORMAT, VERSION = "runahead learned split", 2
MOST_LOG = 20.0
"""Largest log slowness of a rank that a file may hold; no rank is so slow."""
MOST_S, MOST_TOKENS, LEAST_BPS, MOST_BPS = 1e6, 1 << 40, 1.0, 1e18
"""Limits of the other numbers: seconds per token, tokens, bytes per second."""
MOST_GAIN, LEAST_GAIN = 1e4, 1e-4
"""Limits of what lent threads gain."""


@dataclass(frozen=True, kw_only=True)
class LearnedSplit:
    """The timed cost, and what prompts corrected.

    Attributes:
        link: between ranks.
        start: log slowness by rank, as timed.
        prompts: what they told, oldest first.
        times: of prompts that the last rank or all have computed, oldest first.
        gained: by lent threads, as of `Balance`; None: not timed.
    """

    cost: FittedCost
    link: Link
    start: tuple[float, ...]
    prompts: tuple[SeenPrompt, ...] = ()
    times: tuple[SeenTime, ...] = ()
    gained: float | None = None

    @classmethod
    def from_balance(cls, cost: FittedCost, balance: Balance) -> LearnedSplit:
        """Make from the present state of a balance, whose cost was timed."""
        slowness, links = balance.slowness, balance.cluster.links
        assert links is not None, "the ranks have a link"
        return cls(
            cost=cost,
            link=links.default,
            start=slowness.start,
            prompts=tuple(slowness.prompts),
            times=tuple(balance.ways.seen),
            gained=balance.gained,
        )

    @property
    def slowness(self) -> Slowness:
        return Slowness(self.start, self.prompts)


def learned_path(folder: Path, purpose: str) -> Path:
    """File in the cache folder for what is learned under these circumstances."""
    return folder / "splits" / f"{hashlib.sha256(purpose.encode()).hexdigest()[:20]}.json"


def write_learned(path: Path, purpose: str, learned: LearnedSplit) -> None:
    """Write atomically.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "purpose": purpose,
        "cost": learned.cost.as_json(),
        "link": learned.link.as_json(),
        "start": learned.start,
        "prompts": [asdict(prompt) for prompt in learned.prompts],
        "times": [asdict(time) for time in learned.times],
        "gained": learned.gained,
    }
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_learned(path: Path, purpose: str, num_ranks: int) -> LearnedSplit | None:
    """Read what an earlier run wrote; None if there is no file.

    Raises:
        ValueError: the file is damaged, or cannot be read; one line that names it.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(read_user_file(path).decode("utf-8"))
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"it is not a {FORMAT} of version {VERSION}")
        if content.get("purpose") != purpose:
            raise ValueError("it is for another model or machine")
        cost, link = FittedCost.from_json(json.dumps(content["cost"])), content["link"]
        for name in POLYNOMIALS:
            _numbers(list(getattr(cost, name)), len(getattr(cost, name)), MOST_S)
        bandwidth = math.inf if link["bandwidth_Bps"] is None else _number(link["bandwidth_Bps"], MOST_BPS)
        return LearnedSplit(
            cost=cost,
            link=Link(
                latency_s=_number(link["latency_s"], MOST_S),
                bandwidth_Bps=max(bandwidth, LEAST_BPS),
                shared=link["shared"] is True,
            ),
            start=_numbers(content["start"], num_ranks, MOST_LOG),
            prompts=tuple(_prompt(each, num_ranks) for each in content["prompts"]),
            times=tuple(_time(each) for each in content.get("times", [])),  # which older files lack, and this:
            gained=None if content.get("gained") is None else max(_number(content["gained"], MOST_GAIN), LEAST_GAIN),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {first_line(error)})") from error


def _time(value: Any) -> SeenTime:
    return SeenTime(
        tokens=_tokens(value["tokens"]), is_alone=value["is_alone"] is True, log=_number(value["log"], 2 * MOST_LOG)
    )


def _tokens(tokens: Any) -> int:
    if type(tokens) is not int or not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"it holds a prompt of {tokens!r} tokens")
    return tokens


def _prompt(value: Any, num_ranks: int) -> SeenPrompt:
    tokens, slowness = _tokens(value["tokens"]), value["slowness"]
    if not isinstance(slowness, list) or len(slowness) != num_ranks:
        raise ValueError(f"it does not have {num_ranks} numbers where it must")
    return SeenPrompt(
        tokens=tokens,
        slowness=tuple(None if each is None else _number(each, MOST_LOG) for each in slowness),
        surprise=_numbers(value["surprise"], num_ranks, 2 * MOST_LOG),
    )


def _numbers(values: Any, number: int, most: float) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != number:
        raise ValueError(f"it does not have {number} numbers where it must")
    return tuple(_number(value, most) for value in values)


def _number(value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -most <= value <= most:
        raise ValueError(f"{value!r} is not a number up to {most:g}")
    return float(value)
