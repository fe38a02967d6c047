"""Picture of benchmarks/studies/prompt_cache.py, from its lines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.harness.lines import Line
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title

BLUE = "#0072b2"
CURVES = {
    "full": ("full prefill", INK),
    "host": ("modules in host memory", ACCENT),
    "disk": ("modules in mapped files", BLUE),
    "bound": ("new and link tokens alone", MUTED),
}


def ttft_png(lines: Sequence[Line]) -> bytes:
    """Draw TTFT against length, with quadratic and linear guides, and against the cached share at one length.

    Prompts of that one length have no full prefill of their own, except the one that is also among the lengths.
    """
    share_of = max((_tokens(line) for line in lines if "full" not in line["runs"]), default=0)
    figure = new_figure(11.5, 4.6)
    left, right = panels(figure, 2, 1, 2)
    by_length = sorted((line for line in lines if "full" in line["runs"]), key=lambda line: line["point"]["cached"])
    for variant, (name, colour) in CURVES.items():
        x = [_tokens(line) for line in by_length]
        left.plot(x, [_ttft(line, variant) for line in by_length], "o-", color=colour, label=name, lw=1.6, ms=4)
    _guides(left, by_length)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(x, [f"{each:,}" for each in x])
    dress(left, title="by length, the last tokens new", x="tokens of the prompt", y="TTFT, s")
    left.legend(fontsize=8, frameon=False)

    by_share = [line for line in lines if _tokens(line) == share_of]
    by_share = sorted(by_share, key=lambda line: line["point"]["cached"])
    whole = [line for line in by_share if "full" in line["runs"]]
    for variant in ("host", "disk", "bound"):
        name, colour = CURVES[variant]
        x_share = [line["point"]["cached"] / share_of for line in by_share]
        right.plot(x_share, [_ttft(line, variant) for line in by_share], "o-", color=colour, label=name, lw=1.6, ms=4)
    if whole:
        right.axhline(_ttft(whole[0], "full"), color=INK, lw=1.6, label="full prefill")
    right.set_ylim(bottom=0)
    right.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    dress(right, title=f"{share_of:,} tokens, by the share that is cached", x="cached", y="TTFT, s")
    about = lines[-1]
    runs = len(by_length[0]["runs"]["host"])
    subject = f"{about['model']}, {about['dtype']}, {about['threads']} thread, medians of {runs} runs"
    set_title(figure, "Time to first token with cached modules", subject)
    return png(figure)


def _guides(axes: Any, by_length: Sequence[Line]) -> None:
    """Draw a quadratic through the full prefill's last point and a line through that of host memory."""
    x = [_tokens(line) for line in by_length]
    for variant, power, name in (("full", 2, "quadratic"), ("host", 1, "linear")):
        last = _ttft(by_length[-1], variant)
        y = [last * (each / x[-1]) ** power for each in x]
        axes.plot(x, y, ":", color=CURVES[variant][1], lw=1, label=name)


def _tokens(line: Line) -> int:
    return int(line["point"]["cached"] + line["point"]["new"])


def _ttft(line: Line, variant: str) -> float:
    return median(run["ttft_s"] for run in line["runs"][variant])
