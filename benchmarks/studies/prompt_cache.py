"""Time to first token with cached modules against the full prefill, by length and by cached share.

    python -m benchmarks.studies.prompt_cache
    python -m benchmarks.studies.prompt_cache --draw-only

Every point is a prompt of random tokens, some of which are cached in modules and the others new. Variants run in turn:
the full prefill, modules in host memory, modules in memory-mapped files (page cache warm), and the bound: the new and
link tokens alone, without anything to attend to. Appends a JSON line per point and draws
docs/studies/prompt_cache_ttft.png.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.pictures import BLUE, legend
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.prompt_cache_quality import Variant, cut, edges_of
from policies.prompt_cache.placement import LINK_TOKENS
from policies.reuse import ReusingPrompt
from runahead import Engine, GenerationOptions, Model, ModelOptions, Ranks, RanksOptions
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title
from runahead.report import GenerationBatch
from runahead.reuse.store import SegmentStore, StoreLimits

ANSWER_TOKENS = 5
CURVES = {
    "full": ("full prefill", INK),
    "host": ("modules in host memory", ACCENT),
    "disk": ("modules in mapped files", BLUE),
    "bound": ("new and link tokens alone", MUTED),
}


@dataclass(frozen=True)
class Point:
    """Numbers of tokens in a prompt: in modules, of which the first few of each are computed again, and new ones."""

    cached: int
    new: int
    modules: int

    @property
    def total(self) -> int:
        return self.cached + self.new


def prompt_of(point: Point, vocab_size: int) -> ReusingPrompt:
    draw = random.Random(point.total)
    ids = [draw.randrange(vocab_size) for _ in range(point.total)]
    cached, new, edges = ids[: point.cached], ids[point.cached :], edges_of(point.cached, point.modules)
    return cut(cached, edges, new, Variant("linked", link=LINK_TOKENS), last=False)


def measure(run: Run, model: Model, ranks: Ranks, point: Point, folder: Path, *, full: bool) -> Line:
    """Run every variant in turn."""
    prompt = prompt_of(point, model.vocab_size)
    options = GenerationOptions(max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
    in_host = SegmentStore(model)
    plain = Engine(model, ranks)

    def mapped() -> GenerationBatch:
        # A new store, so that nothing of it is in this process's memory yet.
        store = SegmentStore(model, folder, StoreLimits(host_bytes=0))
        return Engine(model, ranks, store=store).generate([prompt], options)

    generate: dict[str, Callable[[], GenerationBatch]] = {
        "bound": lambda: plain.generate([list(prompt.new_ids)], options),
        "host": lambda: Engine(model, ranks, store=in_host).generate([prompt], options),
        "disk": mapped,
    }
    if full:
        generate["full"] = lambda: plain.generate([prompt.ids], options)
    for name in ("host", "disk"):  # encodes
        generate[name]()

    def turn(name: str) -> Callable[[int], dict[str, Any]]:
        def one(_: int) -> dict[str, Any]:
            batch = generate[name]()
            reuse = batch.ranks[0].reuse
            told = None if reuse is None else asdict(reuse)
            return {"ttft_s": batch.ttft_s, "tpot_s": batch.tpot_s, "reuse": told}

        return one

    runs = run.in_turn({name: turn(name) for name in generate}, run.options.repeats)
    return {"point": asdict(point), "computed": len(prompt.new_ids), "runs": runs}


def lines_of(run: Run) -> Iterator[Line]:
    """Measure one line per point: prompts of several lengths, and prompts of one length with several cached shares."""
    options = run.options
    by_length = [Point(length, options.new, options.modules) for length in options.lengths]
    cached = [round(share * options.of) for share in options.shares]
    by_share = [Point(each, options.of - each, options.modules) for each in cached if each]
    with Ranks.start(RanksOptions(threads=options.threads)) as ranks, tempfile.TemporaryDirectory() as folder:
        model = Model.load(ModelOptions(), ranks.device)
        shared = {
            "kind": "ttft",
            "job": run.shared["date"],
            "threads": options.threads,
            "model": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_bytes_per_token": sum(shape.bytes_per_token() for shape in model.kv_shapes),
            "link_tokens": LINK_TOKENS,
        }
        Engine(model, ranks).generate([list(range(64))], GenerationOptions(max_new_tokens=2))  # warm up
        for point in [*by_length, *by_share]:
            yield shared | measure(run, model, ranks, point, Path(folder), full=point in by_length)


def last_job(found: Sequence[Line]) -> list[Line]:
    """Lines of the last run."""
    return [line for line in found if line["job"] == found[-1]["job"]]


def ttft(line: Line, variant: str) -> float:
    """Median TTFT of a variant in seconds."""
    return median(run["ttft_s"] for run in line["runs"][variant])


def table(found: list[Line]) -> str:
    """Format a Markdown table, one row per point of the last run."""
    rows: Rows = [
        ("cached", "new", "computed", "full prefill", "host memory", "speed-up", "files", "bound", "lookup, host")
    ]
    for line in last_job(found):
        point, host_s, full = line["point"], ttft(line, "host"), ("", "")
        if "full" in line["runs"]:
            full = f"{ttft(line, 'full'):.2f} s", f"{ttft(line, 'full') / host_s:.1f}x"
        looked_s = median(run["reuse"]["lookup_s"] for run in line["runs"]["host"])
        counts = f"{point['cached']:,}", f"{point['new']:,}", f"{line['computed']:,}"
        others = f"{ttft(line, 'disk'):.3f} s", f"{ttft(line, 'bound'):.3f} s", f"{looked_s * 1e3:.1f} ms"
        rows.append((*counts, full[0], f"{host_s:.3f} s", full[1], *others))
    return markdown(rows, right=False)


def picture(found: list[Line]) -> bytes:
    """Draw TTFT of the last run against length, with guides, and against the cached share at one length.

    Prompts of that one length have no full prefill of their own, except the one that is also among the lengths.
    """
    lines = sorted(last_job(found), key=lambda line: line["point"]["cached"])
    figure = new_figure(11.5, 4.6)
    left, right = panels(figure, 2, 1, 2)

    def draw(axes: Any, variant: str, x: Sequence[float], drawn: list[Line]) -> None:
        label, colour = CURVES[variant]
        axes.plot(x, [ttft(line, variant) for line in drawn], "o-", color=colour, label=label, lw=1.6, ms=4)

    by_length = [line for line in lines if "full" in line["runs"]]
    lengths = [_tokens(line) for line in by_length]
    for variant in CURVES:
        draw(left, variant, lengths, by_length)
    for variant, power, name in (("full", 2, "quadratic"), ("host", 1, "linear")):  # through the last point
        y = [ttft(by_length[-1], variant) * (length / lengths[-1]) ** power for length in lengths]
        left.plot(lengths, y, ":", color=CURVES[variant][1], lw=1, label=name)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(lengths, [f"{length:,}" for length in lengths])
    dress(left, title="by length, the last tokens new", x="tokens of the prompt", y="TTFT, s")
    legend(left, fontsize=8, labelcolor=None)

    share_of = max((_tokens(line) for line in lines if "full" not in line["runs"]), default=0)
    by_share = [line for line in lines if _tokens(line) == share_of]
    for variant in ("host", "disk", "bound"):
        draw(right, variant, [line["point"]["cached"] / share_of for line in by_share], by_share)
    for line in by_share:
        if "full" in line["runs"]:
            right.axhline(ttft(line, "full"), color=INK, lw=1.6, label="full prefill")
    right.set_ylim(bottom=0)
    right.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    dress(right, title=f"{share_of:,} tokens, by the share that is cached", x="cached", y="TTFT, s")
    about = found[-1]
    runs = len(by_length[0]["runs"]["host"])
    subject = f"{about['model']}, {about['dtype']}, {about['threads']} thread, medians of {runs} runs"
    set_title(figure, "Time to first token with cached modules", subject)
    return png(figure)


def _tokens(line: Line) -> int:
    return int(line["point"]["cached"] + line["point"]["new"])


STUDY = Study(
    name="prompt_cache",
    text=__doc__,
    has="point",
    measure=lines_of,
    table=table,
    options={
        "lengths": option([500, 1000, 2000, 4000, 8000], "cached tokens"),
        "shares": option([0.0, 0.25, 0.5, 0.75, 0.9]),
        "of": option(4064, "tokens of the prompt whose cached share is varied"),
        "new": option(64, "new tokens after so many cached ones"),
        "modules": option(8),
        "repeats": option(3),
        "threads": option(1),
    },
    pictures={"prompt_cache_ttft.png": picture},
)

if __name__ == "__main__":
    torch.set_grad_enabled(False)
    STUDY.main()
