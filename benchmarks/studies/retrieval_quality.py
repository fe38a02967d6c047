"""Quality cost of retrieval over its settings: the loss of a repeated passage and of the text that follows.

    python -m benchmarks.studies.retrieval_quality --text wikitext2.txt --lengths 4096 --samples 2
    python -m benchmarks.studies.retrieval_quality --text wikitext2.txt --groups pool --lengths 2048
    python -m benchmarks.studies.retrieval_quality --draw-only

A sample is a piece of the text as the prompt. After it a passage of the prompt (copy-NLL) and the tokens that really
follow (perplexity) are fed one by one, as in decoding. Groups of settings: `default`; `alpha` and `ratio`, the
paper's Fig. 17, the latter with and without skewing (Fig. 13); `pool`, a pool of 80% of the prompt under each victim,
with and without pinned sinks (Table 2); `others`, policies to compare with.

Appends a JSON line per sample and setting to benchmarks/results/retrieval_quality.jsonl, skipping those that are
there already, draws docs/studies/retrieval_quality.png from these lines and prints them as a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, mode
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.lines import Line
from benchmarks.harness.pictures import BLUE, legend
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_samples import samples, text_ids
from benchmarks.harness.text_table import Rows
from benchmarks.studies.retrieved_prompt import FullCache, RetrievedPrompt, fetched_share
from launch.program.text_table import text_table
from policies import POLICIES
from policies.base import Policy
from policies.infinigen import InfiniGen
from policies.offload import Offload
from runahead import Model, ModelOptions
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title
from runahead.retrieval.cache import RetrievedCache

PASSAGE = 96
BEHIND = 256
SAMPLE_EVERY = 16
FULL: dict[str, Any] = {"name": "full"}
ALPHAS = (1.0, 3.0, 5.0, 6.0, 7.0, 8.0)
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
POOL_SHARE = 0.8


def infinigen(**options: Any) -> dict[str, Any]:
    """Options of InfiniGen, by default with its layers' own queries, as on a CPU, instead of predicted ones."""
    return {"name": "infinigen", "ahead": False} | options


GROUPS: dict[str, list[dict[str, Any]]] = {
    "default": [infinigen(), infinigen(ahead=True), infinigen(ahead=True, first_ahead=1), infinigen(max_fetch=0.06)],
    "alpha": [infinigen(alpha=alpha) for alpha in ALPHAS],
    "ratio": [infinigen(ratio=ratio, skew=skew) for ratio in RATIOS for skew in ("auto", "none")],
    "pool": [
        infinigen(min_tokens=0, sinks=sinks, pool=victim)
        for sinks in (0, 4)
        for victim in ("none", "fifo", "lru", "counter")
    ],
    "others": [{"name": name, "fetch": fetch} for name in ("exact_topk", "quest") for fetch in (0.1, 0.05)],
}
"""Groups of settings. A pool is named by its victim; its bytes depend on the prompt."""


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per sample and setting, the full cache first."""
    options = run.options
    if options.text is None:
        raise SystemExit("--text=<file> is needed, unless --draw-only")
    torch.set_num_threads(1)
    model = Model.load(ModelOptions(), torch.device("cpu"))
    text = text_ids(model, options.text)
    settings = list({str(setting): setting for group in options.groups for setting in GROUPS[group]}.values())
    about: Line = {"text": Path(options.text).name, "model": model.name}
    wanted = [
        (length, number, start, piece)
        for length in options.lengths
        for number, (start, piece) in enumerate(
            samples(text, options.samples, length + BEHIND, option=f"--text={options.text}")
        )
    ]
    for length, number, start, piece in run.bar(wanted, "sample"):
        steps = [about | {"length": length, "start": start, "setting": setting} for setting in [FULL, *settings]]
        missing = [line for line in steps if not run.has(line)]
        if missing:
            ids, following = piece[:length], piece[length:]
            first = [length // 12, length // 2, 5 * length // 6][number % 3]  # passage start: early, middle, late
            prompt = RetrievedPrompt(model, ids)
            for line in missing:
                yield line | scores(prompt, line["setting"], [ids[first : first + PASSAGE], following])


def scores(prompt: RetrievedPrompt, setting: dict[str, Any], tails: list[list[int]]) -> dict[str, Any]:
    """Measure the NLL in nats of each tail's tokens, and the share that was fetched for them."""
    nlls, shares, masses = [], [], []
    conversation = prompt.under(Offload() if setting == FULL else policy_of(prompt, **setting))
    assert conversation.logits_BV is not None
    for tail in tails:
        decoding = FullCache.of(conversation, len(tail)) if setting == FULL else conversation.fork()
        nlls.append(nll(conversation.logits_BV, decoding.follow(torch.tensor([tail[:-1]])), tail))
        if isinstance(decoding.cache, RetrievedCache):
            shares.append(fetched_share(decoding.cache))
            masses += [mass for mass in decoding.cache.retrieval.report().hit_mass if mass is not None]
    fetched, seen = (mean(shares), mean(masses)) if shares else (1.0, 1.0)
    return {"copy_nll": nlls[0], "nll": nlls[1], "fetched_share": fetched, "hit_mass": seen}


def policy_of(prompt: RetrievedPrompt, *, name: str, **options: Any) -> Policy:
    """The policy of a setting. A pool without a victim has no limit."""
    if "pool" in options:
        shapes = prompt.model.kv_shapes[InfiniGen().first_layer :]
        limit = int(POOL_SHARE * len(prompt.ids)) * sum(shape.bytes_per_token() for shape in shapes)
        victim = options["pool"]
        options["pool"] = {} if victim == "none" else {"bytes": limit, "victim": victim}
    return POLICIES[name](**options | {"sample_every": SAMPLE_EVERY})


def nll(first_1V: Tensor, rest_1CV: Tensor, ids: Sequence[int]) -> float:
    """Mean negative log-likelihood of a tail in nats; the prompt's logits predict its first token."""
    logits_CV = torch.cat([first_1V, rest_1CV[0]])
    return float(torch.nn.functional.cross_entropy(logits_CV, torch.tensor(ids)))


def combined(found: list[Line]) -> dict[tuple[int, str], Line]:
    """Means by length and setting, over samples that the full cache has too, and their differences to its means."""
    known = {(line["text"], line["length"], line["start"], str(line["setting"])): line for line in found}
    groups: dict[tuple[int, str], list[Line]] = {}
    for (*sample, setting), line in known.items():
        full = known.get((*sample, str(FULL)))
        if full is not None:
            over = {f"{name}_over": line[name] - full[name] for name in ("copy_nll", "nll")}
            groups.setdefault((line["length"], setting), []).append(line | over)
    names = ("copy_nll", "nll", "copy_nll_over", "nll_over", "fetched_share", "hit_mass")
    return {
        key: group[0] | {name: mean(line[name] for line in group) for name in names} | {"samples": len(group)}
        for key, group in groups.items()
    }


def label(setting: dict[str, Any]) -> str:
    options = ", ".join(f"{name}={value}" for name, value in setting.items() if name != "name")
    return setting["name"] + (f" ({options})" if options else "")


def table(found: list[Line]) -> str:
    rows: Rows = [
        ("tokens", "setting", "copy-NLL", "over full", "perplexity", "over full", "fetched", "seen", "samples")
    ]
    for (length, _), line in sorted(combined(found).items(), key=lambda each: each[0][0]):
        copy = f"{line['copy_nll']:.2f}", f"{line['copy_nll_over']:+.2f}"
        perplexity = f"{math.exp(line['nll']):.2f}", f"{math.exp(line['nll_over']) - 1:+.1%}"
        shares = f"{line['fetched_share']:.1%}", f"{line['hit_mass']:.1%}"
        rows.append((f"{length:,}", label(line["setting"]), *copy, *perplexity, *shares, str(line["samples"])))
    return text_table(rows, left=(1,))


def picture(found: list[Line]) -> bytes:
    """Draw copy-NLL beyond the full cache's over alpha and share of columns, at the length with the most settings."""
    means = combined(found)
    length = mode(length for length, _ in means)
    by_setting = {setting: line for (at, setting), line in means.items() if at == length}
    figure = new_figure(10.4, 4.4)
    left, right = panels(figure, 2, 1, 2)

    def draw(axes: Any, settings: dict[float, dict[str, Any]], **look: Any) -> dict[float, Line]:
        """Draw the measured ones of these settings, given by their x. Returns their lines."""
        points = {x: by_setting[str(setting)] for x, setting in settings.items() if str(setting) in by_setting}
        axes.plot(list(points), [line["copy_nll_over"] for line in points.values()], **look)
        return points

    points = draw(left, {alpha: infinigen(alpha=alpha) for alpha in ALPHAS}, color=ACCENT, marker="D")
    for alpha, line in points.items():
        share, at = f"{line['fetched_share']:.0%}", (alpha, line["copy_nll_over"])
        left.annotate(share, at, fontsize=8, xytext=(4, 5), textcoords="offset points", color=INK)
    for skew, colour, marker, name in (("auto", ACCENT, "D", "skewed"), ("none", BLUE, "s", "as they are")):
        settings = {ratio: infinigen(ratio=ratio, skew=skew) for ratio in RATIOS}
        draw(right, settings, color=colour, marker=marker, label=name)
    for axes in (left, right):
        axes.axhline(0, color=MUTED, linewidth=1, linestyle="--", label="full cache")
        legend(axes)
    lost = "copy-NLL over the full cache's"
    dress(left, title="Fetched: all within alpha of the best", x="alpha, nats (numbers: share of the K,V)", y=lost)
    dress(right, title="Partial keys", x="share of the columns on the device", y=lost)
    some_line = next(iter(by_setting.values()))
    set_title(figure, "What InfiniGen's settings cost", f"{some_line['model']}, {length:,} tokens, {some_line['text']}")
    return png(figure)


STUDY = Study(
    name="retrieval_quality",
    text=__doc__,
    has="setting",
    measure=measure,
    table=table,
    options={
        "text": option(None, "a text file, or one compressed by gzip"),
        "lengths": option([4096], "tokens of the prompts"),
        "samples": option(2),
        "groups": option(["default", "alpha", "ratio", "others"], choices=list(GROUPS)),
    },
    pictures={"retrieval_quality.png": picture},
    key=("text", "length", "start", "setting", "code"),
)

if __name__ == "__main__":
    STUDY.main()
