"""PyramidInfer's Table 3 and Fig. 8 as relations: the shape of the pyramid, and the number of recent tokens that vote.

    python -m benchmarks.studies.pyramid_relations --text book.txt --samples 16
    python -m benchmarks.studies.pyramid_relations --draw-only

A sample is a piece of the text: a passage, then other text. After the prompt, of which the policy kept some tokens,
three quantities are measured without evicting any more:

- perplexity of the text that follows, as in the paper;
- copy-NLL: the loss of the repeated passage in nats per token, which requires looking it up;
- KV cache bytes allocated, against those of the full cache.

Bounds come with them: the full cache, and a prompt without the passage ("unseen"). Appends a JSON line per sample and
policy to benchmarks/results/pyramid_relations.jsonl, skipping those that are there already, draws
docs/studies/pyramid_shape.png and pyramid_recent_ratio.png from these lines alone, and prints them as tables.
"""

# Legend: S tokens.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from benchmarks.evaluation.tasks.base import nll_S
from benchmarks.harness.lines import Line
from benchmarks.harness.pictures import BLUE, GREEN, legend
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_samples import EXAMPLE, samples, text_ids
from benchmarks.harness.text_table import Rows, markdown
from policies.pyramidinfer import PyramidInfer
from runahead import Model, ModelOptions
from runahead.conversation import Conversation
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title
from runahead.thinning.rank_policies import RankPolicies

SHAPES = ("power", "uniform", "more")
MEAN_KEEPS = (0.7, 0.8, 0.6)
RECENT_RATIOS = (0.05, 0.1, 0.2, 0.4, 0.6)
FULL, UNSEEN = "full", "unseen"
KEEP_COLOURS = (GREEN, ACCENT, BLUE)
SHAPE_NAMES = {"power": "less at first\n(power)", "uniform": "uniform", "more": "more at first"}
RECENT_RATIO = 0.2
"""Recent ratio in the comparison of shapes."""


def configurations() -> dict[str, dict[str, Any]]:
    """PyramidInfer's options by name; empty for the bounds."""
    found: dict[str, dict[str, Any]] = {FULL: {}, UNSEEN: {}}
    given = [
        {"schedule": shape, "mean_keep": keep, "recent_ratio": RECENT_RATIO} for keep in MEAN_KEEPS for shape in SHAPES
    ]
    given += [{"schedule": "cosine", "recent_ratio": ratio} for ratio in (*RECENT_RATIOS, 0.8)]
    given += [{"schedule": "power", "mean_keep": 0.7, "recent_ratio": ratio} for ratio in RECENT_RATIOS]
    for options in given:
        found[" ".join(f"{name}={value}" for name, value in options.items())] = options
    return found


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per sample of the text and policy."""
    options = run.options
    model = Model.load(ModelOptions(), torch.device("cpu"))
    about = {
        "text": Path(options.text).name,
        "passage": options.passage,
        "filler": options.filler,
        "behind": options.behind,
        "model": model.name,
    }
    length, ids = options.passage + options.filler + options.behind, text_ids(model, options.text)
    pieces = samples(ids, options.samples, length, option=f"--text={options.text}")
    wanted = [(start, torch.tensor(piece), name) for start, piece in pieces for name in configurations()]
    for start, ids_S, name in run.bar(wanted, "run"):
        line = about | {"start": start, "policy": name}
        if not run.has(line):
            yield line | scores(model, ids_S, options.passage, options.filler, name)


def scores(model: Model, ids_S: Tensor, passage: int, filler: int, name: str) -> dict[str, Any]:
    """Measure one sample under one policy."""
    options = configurations()[name]
    policies = RankPolicies(last=[PyramidInfer(**options)]) if options else RankPolicies()
    prompt_S = ids_S[passage if name == UNSEEN else 0 : passage + filler]
    kept = Conversation(model, policies)
    kept.feed(prompt_S[None])
    return {
        "options": options,
        "kv_bytes": kept.kv_bytes,
        "full_kv_bytes": kept.full_kv_bytes,
        "kept_tokens": kept.kept_tokens,
        "prompt_tokens": len(prompt_S),
        "copy_nll": nll_S(kept, ids_S[:passage].tolist()).mean().item(),
        "text_nll": nll_S(kept, ids_S[passage + filler :].tolist()).mean().item(),
    }


@dataclass(frozen=True)
class Value:
    """Mean over samples, and the standard error of its difference to another policy's on the same samples."""

    mean: float
    error: float = 0.0


class Samples:
    """Lines of the last text and length, by policy.

    Attributes:
        about: what these lines have in common.
        starts: start positions of the samples that every policy has.
        lines: the lines of these samples by policy, in the order of `starts`.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.about = {name: lines[-1][name] for name in ("text", "passage", "filler", "behind", "model")}
        found: dict[str, dict[int, Line]] = {}
        for line in lines:
            if self.about.items() <= line.items():
                found.setdefault(line["policy"], {})[line["start"]] = line
        self.starts = sorted(set.intersection(*map(set, found.values())))
        self.lines = {policy: [by_start[start] for start in self.starts] for policy, by_start in found.items()}

    def policies(self, **options: Any) -> list[tuple[str, dict[str, Any]]]:
        """Names and options of policies that have these options."""
        found = [(name, lines[0]["options"]) for name, lines in self.lines.items()]
        return [(name, has) for name, has in found if options.items() <= has.items()]

    def kept(self, policy: str) -> float:
        """KV cache bytes allocated, as a share of the full cache."""
        return mean(self._column(policy, "kv_bytes")) / mean(self._column(policy, "full_kv_bytes"))

    def layers(self, policy: str) -> list[float]:
        """Tokens kept per layer, as shares of the prompt."""
        kept = [[n / line["prompt_tokens"] for n in line["kept_tokens"]] for line in self.lines[policy]]
        return [mean(layer) for layer in zip(*kept, strict=True)]

    def copy_nll(self, policy: str, against: str | None = None) -> Value:
        return self._value("copy_nll", policy, against)

    def perplexity(self, policy: str, against: str | None = None) -> Value:
        loss = self._value("text_nll", policy, against)
        return Value(math.exp(loss.mean), math.exp(loss.mean) * loss.error)

    def _value(self, what: str, policy: str, against: str | None) -> Value:
        values = self._column(policy, what)
        if against is None or against == policy or len(values) < 2:
            return Value(mean(values))
        differences = [a - b for a, b in zip(values, self._column(against, what), strict=True)]
        return Value(mean(values), stdev(differences) / math.sqrt(len(differences)))

    def _column(self, policy: str, what: str) -> list[float]:
        return [float(line[what]) for line in self.lines[policy]]

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


def by_recent_ratio(samples: Samples, **options: Any) -> dict[float, str]:
    """Names of policies with these options by recent ratio."""
    return dict(sorted((has["recent_ratio"], name) for name, has in samples.policies(**options)))


def shape_png(lines: Sequence[Line]) -> bytes:
    """Draw kept tokens by layer, perplexity and copy-NLL, by shape at equal means."""
    samples, figure = Samples(lines), new_figure(11.4, 4.3)
    pyramid, *losses = panels(figure, 3, 1, 3)
    found = list(zip(by_shape(samples).items(), KEEP_COLOURS, strict=False))
    for (keep, shapes), colour in found:
        policies: dict[float, str] = {place: shapes[shape] for place, shape in enumerate(SHAPE_NAMES)}
        _draw(samples, losses, policies, shapes["uniform"], color=colour, marker="o", label=f"mean keep {keep:g}")
    for shape, dashes in zip(SHAPE_NAMES, ("-", "--", ":"), strict=True):
        pyramid.plot([], [], color=INK, linestyle=dashes, label=SHAPE_NAMES[shape].replace("\n", " "))
        for (_, shapes), colour in found:
            pyramid.plot(samples.layers(shapes[shape]), color=colour, linestyle=dashes, linewidth=1.2)
    dress(pyramid, title="tokens kept", x="layer", y="share of the prompt")
    pyramid.set_ylim(0, 1.05)
    _dress_losses(samples, losses)
    for axes in losses:
        axes.set_xticks(range(len(SHAPE_NAMES)), list(SHAPE_NAMES.values()))
        axes.margins(x=0.15)
    _legend(figure)
    set_title(figure, "Shape of the pyramid", samples.subject("uniform"))
    return png(figure)


def recent_ratio_png(lines: Sequence[Line]) -> bytes:
    """Draw KV cache bytes, perplexity and copy-NLL over the recent ratio."""
    samples, figure = Samples(lines), new_figure(11.4, 4.3)
    kept, *losses = panels(figure, 3, 1, 3)
    series: list[tuple[str, dict[str, Any], str, str]] = [
        ("cosine, as coded by the authors", {"schedule": "cosine"}, ACCENT, "o"),
        ("power, mean keep 0.7", {"schedule": "power", "mean_keep": 0.7}, BLUE, "s"),
    ]
    for label, options, colour, marker in series:
        found = by_recent_ratio(samples, **options)
        if found:
            look = {"color": colour, "marker": marker, "label": label}
            kept.plot(list(found), [samples.kept(name) for name in found.values()], **look)
            _draw(samples, losses, found, found.get(RECENT_RATIO), **look)
    kept.axhline(1, color=MUTED, linestyle="--", linewidth=1)
    dress(kept, title="K,V bytes allocated", x="recent ratio", y="share of all K,V")
    _dress_losses(samples, losses, x="recent ratio")
    _legend(figure)
    set_title(figure, "How many recent tokens vote and stay", samples.subject(f"a ratio of {RECENT_RATIO:g}"))
    return png(figure)


def _draw(samples: Samples, losses: list[Any], policies: dict[float, str], against: str | None, **look: Any) -> None:
    """Draw perplexity and copy-NLL of policies, given by x, with the errors of their differences to `against`."""
    for axes, value_of in zip(losses, (samples.perplexity, samples.copy_nll), strict=True):
        values = [value_of(policy, against) for policy in policies.values()]
        errors = [value.error for value in values]
        axes.errorbar(list(policies), [value.mean for value in values], errors, capsize=3, **look)


def _dress_losses(samples: Samples, losses: Sequence[Any], x: str = "") -> None:
    """Label the panels of perplexity and copy-NLL, with lines of the full cache and a prompt without the passage."""
    perplexity, copy = losses
    full: dict[str, Any] = {"color": MUTED, "linestyle": "--", "linewidth": 1, "label": "full cache"}
    perplexity.axhline(samples.perplexity(FULL).mean, **full)
    copy.axhline(samples.copy_nll(FULL).mean, **full)
    copy.axhline(samples.copy_nll(UNSEEN).mean, color=MUTED, linestyle=":", linewidth=1, label="passage unseen")
    dress(perplexity, title="text that follows", x=x, y="perplexity")
    dress(copy, title="passage again", x=x, y="nats/token")


def _legend(figure: Any) -> None:
    """Add a legend below all panels, each name once."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    legend(figure, handles=list(found.values()), labels=list(found), loc="outside lower left", ncols=len(found))


def tables(lines: Sequence[Line]) -> str:
    """Format all measurements as a Markdown table."""
    samples = Samples(lines)
    rows: Rows = [("policy", "K,V bytes", "perplexity", "copy-NLL")]
    references = {name: shapes["uniform"] for shapes in by_shape(samples).values() for name in shapes.values()}
    for name, options in samples.policies():
        against = references.get(name)
        if against is None and options:
            same = {key: value for key, value in options.items() if key != "recent_ratio"}
            against = by_recent_ratio(samples, **same).get(RECENT_RATIO)
        values = samples.perplexity(name, against), samples.copy_nll(name, against)
        losses = (f"{value.mean:.2f}" + (f" ± {value.error:.2f}" if value.error else "") for value in values)
        rows.append((name, f"{samples.kept(name):.1%}", *losses))
    return f"{samples.subject('the row without one')}\n\n{markdown(rows, right=False)}"


STUDY = Study(
    name="pyramid_relations",
    text=__doc__,
    has="policy",
    measure=measure,
    table=tables,
    options={
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
        "samples": option(4, "pieces of the text, spread over it"),
        "passage": option(128, "tokens"),
        "filler": option(640, "tokens between the passage and its second occurrence"),
        "behind": option(128, "tokens of the text that follows"),
    },
    pictures={"pyramid_shape.png": shape_png, "pyramid_recent_ratio.png": recent_ratio_png},
    key=("text", "passage", "filler", "behind", "model", "start", "policy"),
)

if __name__ == "__main__":
    STUDY.main()
