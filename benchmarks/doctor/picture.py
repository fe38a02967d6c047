"""The doctor's picture: TTFT by prompt length with its bounds, speed-ups by number of ranks, and the links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.doctor.findings import Verdict
from benchmarks.doctor.speed import NAMES
from benchmarks.harness.pictures import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION, Look, legend
from benchmarks.ttft.variants import BASELINE, BOUND, OURS
from runahead.picture_style import INK, MUTED, new_figure, png, set_lengths, set_seconds, set_title, style_axes

LOOKS = {
    BASELINE: Look(BLACK, "s"),
    "tensor": Look(ORANGE, "D"),
    "zigzag": Look(PURPLE, "^"),
    OURS: Look(VERMILION, "o"),
    BOUND: Look(BLUE, "v", "--"),
}


def picture(page: dict[str, Any]) -> bytes:
    """The page's picture as a PNG."""
    figure = new_figure(12.5, 4.4)
    left, middle, right = figure.subplots(1, 3)
    races = page["races"]
    most = max((race["ranks"] for race in races), default=page["ranks"])
    _draw_ttft(left, [race for race in races if race["ranks"] == most], most)
    _draw_speedups(middle, [race for race in races if race["ranks"] > 1])
    _draw_links(right, page)
    verdicts = {"good": "within its bounds", "short": "short of a bound", "failed": "not fit yet"}
    probe = page["probe"]
    subject = ", ".join(page["hosts"]) + ("" if probe is None else f"; {probe['model']}, {probe['dtype']}")
    ranks = f"{page['ranks']} rank{'s' * (page['ranks'] > 1)}"
    set_title(figure, f"{ranks}: {verdicts[page['verdict']]}", f"{subject}; {page['date']}")
    return png(figure)


def _draw_ttft(axes: Any, races: Sequence[dict[str, Any]], num_ranks: int) -> None:
    """TTFT of every method on the most ranks, by prompt length."""
    style_axes(axes, title=f"TTFT on {num_ranks} rank{'s' * (num_ranks > 1)}", x="prompt tokens", y="seconds")
    lengths = [race["length"] for race in races]
    for name, look in LOOKS.items():
        points = [(race["length"], race["ttft_s"][name]) for race in races if name in race["ttft_s"]]
        if points:
            x, spreads = zip(*points, strict=True)
            y = [spread["median"] for spread in spreads]
            axes.plot(x, y, look.dashes, marker=look.marker, color=look.colour, label=NAMES[name], markersize=5)
    if not races:
        _say(axes, "no speed was measured")
        return
    if num_ranks > 1:
        axes.plot(lengths, [race["star_s"] for race in races], ":", color=MUTED, label="TTFT*(p)")
    axes.set_yscale("log")
    set_lengths(axes, lengths)
    set_seconds(axes.yaxis, log=True)
    legend(axes)


def _draw_speedups(axes: Any, races: Sequence[dict[str, Any]]) -> None:
    """Speed-up of KV-Runahead over one rank, and of its bound, by number of ranks and length."""
    style_axes(axes, title="Over one rank: KV-Runahead, and its bound TTFT(p)", y="times as fast", grid="y")
    if not races:
        _say(axes, "no speed-up was measured")
        return
    for n, race in enumerate(races):
        alone = race["ttft_s"][BASELINE]["median"]
        ours, bound = (alone / race["ttft_s"][name]["median"] for name in (OURS, BOUND))
        axes.bar(n, ours, color=VERMILION, width=0.6, label=NAMES[OURS] if n == 0 else None)
        axes.plot([n - 0.38, n + 0.38], [bound, bound], color=BLUE, linewidth=2, label=NAMES[BOUND] if n == 0 else None)
        axes.text(n, 0.05, f"{ours:.2f}", ha="center", va="bottom", fontsize=9, color="white")
    axes.axhline(1, color=MUTED, linewidth=0.8)
    axes.set_xticks(range(len(races)), [f"{race['ranks']} ranks\n{race['length']:,}" for race in races])
    axes.set_ylim(top=1.2 * max(axes.get_ylim()[1], 1))
    legend(axes, loc="upper left", ncols=2)


def _draw_links(axes: Any, page: dict[str, Any]) -> None:
    """Rate of every measured link, short ones in another colour."""
    style_axes(axes, title="Links between ranks", x="Gbit/s", grid="x")
    links = {} if page["probe"] is None else page["probe"]["links"]
    if not links:
        _say(axes, "no link was measured")
        return
    short = {each["name"] for each in page["findings"] if each["verdict"] == Verdict.short.name}
    for n, (pair, link) in enumerate(links.items()):
        rate = link["bandwidth_Bps"] * 8 / 1e9
        axes.barh(n, rate, color=VERMILION if f"ranks {pair}" in short else GREEN, height=0.6)
        axes.text(rate, n, f" {rate:.3g}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(links)), [f"ranks {pair}" for pair in links])
    room = max(0.0, 5 - len(links)) / 2
    axes.set_ylim(len(links) - 0.5 + room, -0.5 - room)
    axes.margins(x=0.15)


def _say(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=9, color=MUTED)
    axes.set_xticks([])
    axes.set_yticks([])
