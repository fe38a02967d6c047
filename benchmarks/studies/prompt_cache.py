"""Time to first token with cached modules against the full prefill, by length and by cached share.

    python -m benchmarks.studies.prompt_cache
    python -m benchmarks.studies.prompt_cache --draw-only

Every point is a prompt of random tokens, some of which are cached in modules and the others new. Variants run in turn:
the full prefill, modules in host memory, modules in memory-mapped files (page cache warm), and the bound: the new and
link tokens alone, without anything to attend to. Appends a JSON line per point and draws
docs/prompt_cache_ttft.png.
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
from benchmarks.harness.study import Run, Study, option
from benchmarks.studies.prompt_cache_pictures import ttft_png
from policies.prompt_cache.placement import LINK_TOKENS
from policies.reuse import ReusingPrompt, Segment, SegmentUse
from runahead import Engine, GenerationOptions, Model, ModelOptions, Ranks, RanksOptions
from runahead.report import GenerationBatch
from runahead.reuse.store import SegmentStore, StoreLimits

ANSWER_TOKENS = 5


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
    edges = [round(number * point.cached / point.modules) for number in range(point.modules + 1)]
    uses, again = [], dict[int, int]()
    for start, end in zip(edges, edges[1:], strict=False):  # noqa: RUF007
        segment = Segment(name=f"{start}", ids=tuple(ids[start:end]), positions=tuple(range(start, end)))
        first = LINK_TOKENS if start else 0
        again.update((position, ids[position]) for position in range(start, start + first))
        uses.append(SegmentUse(segment=segment, parts=(range(first, end - start),)))
    new = sorted(again.items()) + list(enumerate(ids[point.cached :], point.cached))
    return ReusingPrompt(
        uses=tuple(uses),
        new_ids=tuple(token for _, token in new),
        new_positions=tuple(position for position, _ in new),
    )


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


def ttft(line: Line, variant: str) -> float | None:
    """Median TTFT of a variant in seconds, or None if it was not run."""
    runs = line["runs"].get(variant)
    return median(run["ttft_s"] for run in runs) if runs else None


def table(found: list[Line]) -> str:
    """Format a Markdown table, one row per point of the last run."""
    rows = [
        "| cached | new | computed | full prefill | host memory | speed-up | files | bound | lookup, host |",
        "|---" * 9 + "|",
    ]
    for line in last_job(found):
        point, host, full = line["point"], ttft(line, "host"), ttft(line, "full")
        looked = median(run["reuse"]["lookup_s"] for run in line["runs"]["host"])
        cells = [f"{point['cached']:,}", f"{point['new']:,}", f"{line['computed']:,}"]
        cells += ["" if full is None else f"{full:.2f} s", f"{host:.3f} s"]
        cells += ["" if full is None or host is None else f"{full / host:.1f}x"]
        cells += [f"{ttft(line, 'disk'):.3f} s", f"{ttft(line, 'bound'):.3f} s", f"{looked * 1e3:.1f} ms"]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def picture(found: list[Line]) -> bytes:
    """Draw the picture of the last run."""
    return ttft_png(last_job(found))


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
