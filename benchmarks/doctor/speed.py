"""Verdicts on TTFT: KV-Runahead against one rank, tensor parallelism, zigzag and the bounds, by a benchmark's lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.doctor.findings import Finding, Verdict
from benchmarks.harness.lines import Line
from benchmarks.ttft.comparison import Spread
from benchmarks.ttft.variants import BASELINE, BOUND, OURS
from partitioner.simulation.bounds import ttft_star
from runahead.config import Attention

PEERS = ("zigzag", "tensor")
NAMES = {BASELINE: "one rank", OURS: "KV-Runahead", BOUND: "TTFT(p)", "zigzag": "zigzag", "tensor": "TP"}
"""Variants that are measured, as the page calls them."""

LINES_OF = {True: [BASELINE, OURS, *PEERS, BOUND], False: [BASELINE]}
"""Variants that run on several ranks, and on one."""

LEAST_BOUND_SHARE = 0.85
"""Share of TTFT(p) over TTFT below which a run is short of its bound."""

LEAST_COMPUTE_SHARE = 0.7
"""Share of TTFT*(p) over TTFT(p) below which chunks compute less efficiently than the whole prompt."""

MOST_SPREAD = 0.3
"""Excess of the slowest round over the fastest above which something else is suspected to run."""

LAUNCH_S = 0.75e-3
"""Seconds in which the host starts the kernels of a layer."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """Measured TTFT of one prompt length on one number of ranks, by variant, in seconds.

    Attributes:
        star_s: TTFT*(p), the bound from one rank's TTFT alone.
        sent_bytes: keys and values that KV-Runahead sends, all ranks together.
        tokens: the first token by variant.
    """

    ranks: int
    length: int
    ttft_s: Mapping[str, Spread]
    star_s: float
    sent_bytes: int
    tokens: Mapping[str, int | None]

    def as_json(self) -> dict[str, Any]:
        seconds = {name: vars(spread) for name, spread in self.ttft_s.items()}
        return vars(self) | {"ttft_s": seconds, "tokens": dict(self.tokens)}

    @property
    def speedup(self) -> float:
        """Speed-up of KV-Runahead over one rank."""
        return self.ttft_s[BASELINE].median / self.ttft_s[OURS].median


def races(lines: Sequence[Line]) -> list[Race]:
    """The races of one benchmark's lines, by length."""
    found = []
    for length in sorted({line["length"] for line in lines}):
        of_length = {line["variant"]: line for line in lines if line["length"] == length}
        first = next(iter(of_length.values()))
        ttft_s = {name: Spread.over([run["ttft_s"] for run in line["runs"]]) for name, line in of_length.items()}
        race = Race(
            ranks=first["ranks"],
            length=length,
            ttft_s=ttft_s,
            # Of the same rounds: a machine's speed drifts.
            star_s=ttft_star(ttft_s[BASELINE].median, first["ranks"], Attention.causal),
            sent_bytes=of_length[OURS]["sent_bytes"] if OURS in of_length else 0,
            tokens={name: line["first_token"] for name, line in of_length.items()},
        )
        found.append(race)
    return found


def check_race(race: Race, probe: Mapping[str, Any]) -> list[Finding]:
    """Findings on one race: against its bounds, and against the other methods."""
    if race.ranks == 1:
        shown = seconds(race.ttft_s[BASELINE])
        about = {"group": "speed", "name": f"{race.length:,} tokens on 1 rank", "measured": shown}
        return [Finding(verdict=Verdict.noted, words="one rank alone; several are not measured", **about)]
    ours, bound_s = race.ttft_s[OURS], race.ttft_s[BOUND].median
    reasons = [*_short_of_compute(race, probe, bound_s), *_short_of_equal_chunks(race, probe, bound_s)]
    faster = {name: race.ttft_s[name].median for name in PEERS if name in race.ttft_s}
    ahead = {name: s for name, s in faster.items() if s < ours.low}
    words = f"{race.speedup:.2f} times as fast as one rank"
    for name, each_s in faster.items():
        words += f", {each_s / ours.median:.2f} times as fast as {NAMES[name]}"
    noisy = {NAMES[name]: spread.high / spread.low - 1 for name, spread in race.ttft_s.items()}
    if max(noisy.values()) > MOST_SPREAD:
        worst = max(noisy, key=lambda name: noisy[name])
        reasons = [  # nothing else can be told of such rounds
            f"rounds of {worst} differ by {noisy[worst]:.0%}: something else used these processors or links; end it, "
            "or measure more rounds (doctor.rounds)"
        ]
    elif race.speedup < 1:
        reasons.append("one rank is faster: use one for prompts of this length")
    elif ahead:
        best = min(ahead, key=lambda name: ahead[name])
        reasons.append(f"{NAMES[best]} is faster here: prefill={best} is exact too")
    finding = Finding(
        group="speed",
        name=f"{race.length:,} tokens on {race.ranks} ranks",
        verdict=Verdict.short if reasons else Verdict.good,
        measured=seconds(ours),
        bound=f"{bound_s:.3g} s TTFT(p), {race.star_s:.3g} s TTFT*(p)",
        words="; ".join([words, *reasons]),
    )
    return [finding]


def _short_of_compute(race: Race, probe: Mapping[str, Any], bound_s: float) -> list[str]:
    """Why the run takes longer than its chunks alone, if it does."""
    ours_s = race.ttft_s[OURS].median
    if bound_s >= LEAST_BOUND_SHARE * ours_s:
        return []
    short = f"{1 - bound_s / ours_s:.0%} of the time is not compute"
    slowest = min((link["bandwidth_Bps"] for link in probe["links"].values()), default=float("inf"))
    sending_s = race.sent_bytes / slowest / max(1, race.ranks - 1)
    if sending_s > 0.5 * bound_s:
        return [
            f"{short}: its keys and values take {sending_s:.3g} s on the slowest link, so ranks wait for it; use a "
            "faster link, prefill.wire_bits=8, or fewer ranks"
        ]
    if probe["device"] != "cpu" and ours_s / probe["layers"] < LAUNCH_S * 1.5:
        return [
            f"{short}: at {ours_s / probe['layers'] * 1e3:.2g} ms a layer the host cannot start kernels fast enough; "
            "use longer prompts or fewer ranks"
        ]
    return [
        f"{short}: ranks wait for each other, since the split does not fit this machine or something else ran "
        "meanwhile; end other processes, search a split (python -m partitioner.search), and look at a timeline "
        "(timeline=run.json)"
    ]


def _short_of_equal_chunks(race: Race, probe: Mapping[str, Any], bound_s: float) -> list[str]:
    """Why the chunks alone take longer than their share of the prompt, if they do."""
    if race.star_s >= LEAST_COMPUTE_SHARE * bound_s:
        return []
    cause = (
        "chunks are too short to keep a GPU busy, so use longer prompts or fewer ranks"
        if probe["device"] != "cpu"
        else "the ranks share cores, caches and memory bandwidth, or chunks are short; use fewer ranks per host, fewer "
        "threads per rank, or longer prompts"
    )
    return [f"computing at once is {bound_s / race.star_s:.2f} times as slow as its share of one rank: {cause}"]


def check_tokens(race: Race) -> list[Finding]:
    """A note if methods chose different first tokens, which rounding may do where logits are close."""
    tokens = {NAMES[name]: token for name, token in race.tokens.items() if token is not None and name in NAMES}
    if len(set(tokens.values())) <= 1:
        return []
    shown = ", ".join(f"{name}: {token}" for name, token in tokens.items())
    name = f"first token of {race.length:,} tokens"
    words = "methods differ; in 16 bits rounding may decide between close logits, in float32 it should not"
    return [Finding(group="speed", name=name, verdict=Verdict.noted, measured=shown, words=words)]


def seconds(spread: Spread) -> str:
    """A median with its range."""
    return f"{spread.median:.3g} s ({spread.low:.3g} to {spread.high:.3g})"
