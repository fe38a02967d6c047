"""Tables of measurements: for a terminal while a benchmark runs, and in Markdown for documents."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.lines import Line, measured
from benchmarks.harness.text_table import Rows, markdown, mebibytes
from benchmarks.ttft.comparison import Comparison, Point
from benchmarks.ttft.variants import BASELINE, BOUND, OURS
from runahead.picture_style import seconds, tokens

COLUMNS = (
    "variant",
    "median TTFT",
    "min to max (n)",
    f"over {BASELINE}",
    f"{OURS} over it",
    "TTFT(p) / TTFT",
    "FLOPS",
    "sent",
    "formula",
    "on the wire",
    "K,V kept",
    "K,V peak",
    "memory peak",
)
NOTES = (
    "TTFT: time to first token. `over single`, `kvr_s over it`: median of the ratios round by round, with their range. "
    "TTFT(p): if K,V arrived at once; that is compute_only in the same rounds, else the best split as predicted from "
    "measured compute. FLOPS: operations of the causal prompt over the measured peak of all ranks. Sent (K,V), formula "
    "(K,V; hidden states for tensor), on the wire (headers included), kept (K,V behind the first token): all ranks "
    "together, per prompt. Peaks: of the rank with the most; memory is that of the process, with the weights of every "
    "variant that loads its own."
)


def rows(points: dict[str, Point], order: Sequence[str]) -> Rows:
    """Rows of one length and network, one per variant."""
    found: Rows = []
    for name in order:
        if name not in points:
            continue
        point, line = points[name], points[name].line
        ttft = point.seconds
        flops = line["flops"]
        utilisation = "-" if flops is None else f"{sum(flops.values()) / ttft.median / line['peak_flops']:.0%}"
        found.append(
            (
                name,
                seconds(ttft.median),
                f"{seconds(ttft.low)} to {seconds(ttft.high)} ({ttft.number})",
                _ratio(point, points.get(BASELINE)),
                _ratio(points.get(OURS), point),
                _of_bound(point, points.get(BOUND)),
                utilisation,
                mebibytes(line["sent_bytes"]),
                mebibytes(line["formula_bytes"]),
                mebibytes(line["wire_bytes"]),
                mebibytes(line["memory"].get("kv_kept_bytes")),
                mebibytes(max(line["memory"]["kv_peak_bytes"])),
                mebibytes(max(line["memory"]["peak_bytes"])),
            )
        )
    return found


def _ratio(faster: Point | None, other: Point | None) -> str:
    if faster is None or other is None or faster is other:
        return "-"
    spread = faster.faster_than(other)
    return "-" if spread is None else f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


def _of_bound(point: Point, bound: Point | None) -> str:
    """TTFT(p) over this TTFT: measured in the same rounds if possible, else predicted."""
    spread = None if bound is None or bound is point else point.faster_than(bound)
    if spread is None:
        return f"{point.line['bounds']['free_s'] / point.seconds.median:.0%}"
    return f"{spread.median:.1%} ({spread.low:.1%} to {spread.high:.1%})"


def bounds_rows(lines: Sequence[Line]) -> Rows:
    """Rows of the bounds from compute, one per length."""
    found: Rows = [
        ("tokens", "TTFT(1)", "TTFT(p)", "TTFT*(p) causal", "TTFT*(p) dense", "matmul", "attention", "at peak")
    ]
    for line in sorted(lines, key=lambda each: int(each["length"])):
        bounds, flops = line["bounds"], line["flops"]
        operations = ("-", "-", "-")
        if flops is not None:
            operations = (
                f"{flops['matmul'] / 1e9:,.1f} GFLOP",
                f"{flops['attention'] / 1e9:,.1f} GFLOP",
                seconds(sum(flops.values()) / line["peak_flops"]),
            )
        times = (bounds["single_s"], bounds["free_s"], bounds["star_causal_s"], bounds["star_dense_s"])
        found.append((tokens(int(line["length"])), *map(seconds, times), *operations))
    return found


def document(compared: Sequence[Comparison]) -> str:
    """Format all tables in Markdown, with headings of the third and fourth level."""
    parts = []
    for comparison in compared:
        parts.append(f"### {comparison.subject()}\n")
        hardware = comparison.place["hardware"]
        first = comparison.line(*next(iter(comparison.points)))
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
        about = measured([comparison.line(*at) for at in comparison.points])
        parts.append(f"{hardware['cores']} cores, {hardware['ram_gib']} GiB; {versions}; {about}.\n")
        for network in comparison.networks():
            lengths = comparison.lengths(network)
            parts.append(f"#### Bounds, {network}\n")
            parts.append(markdown(bounds_rows([comparison.line(network, length) for length in lengths])))
            for length in lengths:
                parts.append(f"#### {tokens(length)} tokens, {network}\n")
                parts.append(markdown([COLUMNS, *rows(comparison.points[network, length], comparison.variants())]))
        noise = noise_rows(comparison)
        if len(noise) > 1:
            parts.append("#### What noise costs\n")
            parts.append(markdown(noise))
    return "\n".join([*parts, NOTES + "\n"])


def noise_rows(comparison: Comparison) -> Rows:
    """Rows per network, length and variant that ran both with and without noise."""
    found: Rows = [("variant", "tokens", "network", "quiet", "noise", "degradation")]
    for network, length, variant, quiet_s, noisy_s in comparison.noise_pairs():
        lost = f"{noisy_s / quiet_s - 1:+.1%}"
        found.append((variant, tokens(length), str(network), seconds(quiet_s), seconds(noisy_s), lost))
    return found
