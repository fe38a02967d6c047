"""Pictures and tables of PyramidInfer's relations, from their lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from benchmarks.harness.lines import Line
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title

BLUE, GREEN = "#0072b2", "#009e73"
KEEP_COLOURS = (GREEN, ACCENT, BLUE)
SHAPE_NAMES = {"power": "less at first\n(power)", "uniform": "uniform", "more": "more at first"}
RECENT_RATIO = 0.2
"""Recent ratio in the comparison of shapes."""


@dataclass(frozen=True)
class Value:
    """Mean over samples, and the standard error of its difference to another policy's on the same samples."""

    mean: float
    error: float = 0.0


class Samples:
    """Lines of one text and one length, by policy and sample."""

    def __init__(self, lines: Sequence[Line]) -> None:
        newest = lines[-1]
        self.about = {name: newest[name] for name in ("text", "passage", "filler", "behind", "model")}
        self._by_policy: dict[str, dict[int, Line]] = {}
        for line in lines:
            if all(line[name] == value for name, value in self.about.items()):
                self._by_policy.setdefault(line["policy"], {})[line["start"]] = line
        complete = [set(by_start) for by_start in self._by_policy.values()]
        self.starts = sorted(set.intersection(*complete))
        """Start positions of the samples that every policy has."""

    def policies(self, **options: Any) -> list[tuple[str, dict[str, Any]]]:
        """Names and options of policies that have these options."""
        found = []
        for name, by_start in self._by_policy.items():
            has = next(iter(by_start.values()))["options"]
            if all(has.get(option) == value for option, value in options.items()):
                found.append((name, has))
        return found

    def column(self, policy: str, what: str) -> list[float]:
        return [float(self._by_policy[policy][start][what]) for start in self.starts]

    def kept(self, policy: str) -> float:
        """KV cache bytes allocated, as a share of the full cache."""
        return mean(self.column(policy, "kv_bytes")) / mean(self.column(policy, "full_kv_bytes"))

    def layers(self, policy: str) -> list[float]:
        """Tokens kept per layer, as shares of the prompt."""
        lines = [self._by_policy[policy][start] for start in self.starts]
        return [mean(layer) for layer in zip(*([n / x["prompt_tokens"] for n in x["kept_tokens"]] for x in lines))]  # noqa: B905

    def copy_nll(self, policy: str, against: str | None = None) -> Value:
        return self._value("copy_nll", policy, against)

    def perplexity(self, policy: str, against: str | None = None) -> Value:
        loss = self._value("text_nll", policy, against)
        return Value(math.exp(loss.mean), math.exp(loss.mean) * loss.error)

    def _value(self, what: str, policy: str, against: str | None) -> Value:
        values = self.column(policy, what)
        if against is None or against == policy or len(values) < 2:
            return Value(mean(values))
        differences = [a - b for a, b in zip(values, self.column(against, what), strict=True)]
        return Value(mean(values), stdev(differences) / math.sqrt(len(differences)))

    def subject(self, reference: str) -> str:
        """Subtitle of a picture whose error bars are those of differences to `reference`."""
        about = self.about
        return (
            f"{about['model']}, {about['text']}, {len(self.starts)} samples of {about['passage']} + {about['filler']} "
            f"tokens; bars: standard error of the difference to {reference}, sample by sample"
        )


def by_shape(samples: Samples) -> dict[float, dict[str, str]]:
    """Names of policies by mean keep and shape."""
    found: dict[float, dict[str, str]] = {}
    for name, options in samples.policies(recent_ratio=RECENT_RATIO):
        if "mean_keep" in options and options["schedule"] in SHAPE_NAMES:
            found.setdefault(options["mean_keep"], {})[options["schedule"]] = name
    whole = {keep: shapes for keep, shapes in found.items() if shapes.keys() == SHAPE_NAMES.keys()}
    return dict(sorted(whole.items(), reverse=True))


def by_recent_ratio(samples: Samples, **options: Any) -> list[tuple[float, str]]:
    return sorted((has["recent_ratio"], name) for name, has in samples.policies(**options))


def shape_png(lines: Sequence[Line]) -> bytes:
    """Draw kept tokens by layer, perplexity and copy-NLL, by shape at equal means."""
    samples = Samples(lines)
    figure = new_figure(11.4, 4.3)
    pyramid, perplexity, copy = panels(figure, 3, 1, 3)
    at = {shape: x for x, shape in enumerate(SHAPE_NAMES)}
    found = by_shape(samples)
    for (keep, shapes), colour in zip(found.items(), KEEP_COLOURS, strict=False):
        label = f"mean keep {keep:g}"
        for axes, value_of in ((perplexity, samples.perplexity), (copy, samples.copy_nll)):
            values = [value_of(shapes[shape], shapes["uniform"]) for shape in at]
            means, errors = [value.mean for value in values], [value.error for value in values]
            axes.errorbar(list(at.values()), means, errors, color=colour, marker="o", capsize=3, label=label)
    for shape, dashes in zip(SHAPE_NAMES, ("-", "--", ":"), strict=True):
        pyramid.plot([], [], color=INK, linestyle=dashes, label=SHAPE_NAMES[shape].replace("\n", " "))
        for shapes, colour in zip(found.values(), KEEP_COLOURS, strict=False):
            pyramid.plot(samples.layers(shapes[shape]), color=colour, linestyle=dashes, linewidth=1.2)
    _bounds(samples, perplexity, copy)
    dress(pyramid, title="tokens kept", x="layer", y="share of the prompt")
    pyramid.set_ylim(0, 1.05)
    for axes, title, unit in ((perplexity, "text that follows", "perplexity"), (copy, "passage again", "nats/token")):
        dress(axes, title=title, y=unit)
        axes.set_xticks(list(at.values()), list(SHAPE_NAMES.values()))
        axes.margins(x=0.15)
    _legend(figure, (pyramid, perplexity, copy))
    set_title(figure, "Shape of the pyramid", samples.subject("uniform"))
    return png(figure)


def recent_ratio_png(lines: Sequence[Line]) -> bytes:
    """Draw KV cache bytes, perplexity and copy-NLL over the recent ratio."""
    samples = Samples(lines)
    figure = new_figure(11.4, 4.3)
    kept, perplexity, copy = panels(figure, 3, 1, 3)
    series: list[tuple[str, dict[str, Any], str, str]] = [
        ("cosine, as coded by the authors", {"schedule": "cosine"}, ACCENT, "o"),
        ("power, mean keep 0.7", {"schedule": "power", "mean_keep": 0.7}, BLUE, "s"),
    ]
    for label, options, colour, marker in series:
        found = by_recent_ratio(samples, **options)
        if not found:
            continue
        ratios, names = [ratio for ratio, _ in found], [name for _, name in found]
        against = next((name for ratio, name in found if ratio == RECENT_RATIO), None)
        look = {"color": colour, "marker": marker, "label": label}
        kept.plot(ratios, [samples.kept(name) for name in names], **look)
        for axes, value_of in ((perplexity, samples.perplexity), (copy, samples.copy_nll)):
            values = [value_of(name, against) for name in names]
            axes.errorbar(ratios, [x.mean for x in values], [x.error for x in values], capsize=3, **look)
    _bounds(samples, perplexity, copy)
    kept.axhline(1, color=MUTED, linestyle="--", linewidth=1)
    dress(kept, title="K,V bytes allocated", x="recent ratio", y="share of all K,V")
    dress(perplexity, title="text that follows", x="recent ratio", y="perplexity")
    dress(copy, title="passage again", x="recent ratio", y="nats/token")
    _legend(figure, (kept, perplexity, copy))
    set_title(figure, "How many recent tokens vote and stay", samples.subject(f"a ratio of {RECENT_RATIO:g}"))
    return png(figure)


def _legend(figure: Any, all_axes: Sequence[Any]) -> None:
    """Add a legend below all panels, each name once."""
    found: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    look: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": INK}
    figure.legend(list(found.values()), list(found), loc="outside lower left", ncols=len(found), **look)


def _bounds(samples: Samples, perplexity: Any, copy: Any) -> None:
    """Draw lines of the full cache, and of a prompt without the passage."""
    perplexity.axhline(samples.perplexity("full").mean, color=MUTED, linestyle="--", linewidth=1, label="full cache")
    copy.axhline(samples.copy_nll("full").mean, color=MUTED, linestyle="--", linewidth=1, label="full cache")
    copy.axhline(samples.copy_nll("unseen").mean, color=MUTED, linestyle=":", linewidth=1, label="passage unseen")


def tables(lines: Sequence[Line]) -> str:
    """Format all measurements as Markdown tables."""
    samples = Samples(lines)
    rows = [
        samples.subject("the row without one"),
        "",
        "| policy | K,V bytes | perplexity | copy-NLL |",
        "|---|---|---|---|",
    ]
    references = {name: shapes["uniform"] for shapes in by_shape(samples).values() for name in shapes.values()}
    for name, options in samples.policies():
        against = references.get(name)
        if against is None and options:
            same = {key: value for key, value in options.items() if key != "recent_ratio"}
            against = dict(by_recent_ratio(samples, **same)).get(RECENT_RATIO)
        perplexity, copy = samples.perplexity(name, against), samples.copy_nll(name, against)
        errors = [f" ± {value.error:.2f}" if value.error else "" for value in (perplexity, copy)]
        share = f"{samples.kept(name):.1%}"
        rows.append(f"| {name} | {share} | {perplexity.mean:.2f}{errors[0]} | {copy.mean:.2f}{errors[1]} |")
    return "\n".join(rows)
