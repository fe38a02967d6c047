"""Time to first token with cached modules against the full prefill, by length and by cached share.

    python -m benchmarks.studies.prompt_cache
    python -m benchmarks.studies.prompt_cache --plot-only

Every point is a prompt of random tokens, of which some are cached in modules and the others are new. Variants run in
turn: the full prefill, modules in host memory, modules in files that are mapped (page cache warm), and the bound: the
new and link tokens alone, without anything to attend to. Appends a JSON line per point and draws
docs/prompt_cache_ttft.png.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness import lines, machine
from benchmarks.harness.machine import ROOT
from benchmarks.studies.prompt_cache_pictures import ttft_png
from partitioner.table.fingerprint import now
from policies.prompt_cache.placement import LINK_TOKENS
from policies.reuse import ReusingPrompt, Segment, SegmentUse
from runahead import Engine, GenerationOptions, Model, ModelOptions, Ranks, RanksOptions
from runahead.files import write_whole
from runahead.report import GenerationBatch, library_versions
from runahead.reuse.store import SegmentStore, StoreLimits

RESULTS = ROOT / "benchmarks" / "results" / "prompt_cache.jsonl"
PICTURE = ROOT / "docs" / "prompt_cache_ttft.png"
ANSWER_TOKENS = 5


@dataclass(frozen=True)
class Point:
    """A prompt: tokens in modules, of which the first few of each are computed again, and new tokens."""

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


def measure(model: Model, ranks: Ranks, point: Point, folder: Path, repeats: int, full: bool) -> dict[str, Any]:
    """Runs of every variant, interleaved."""
    prompt = prompt_of(point, model.vocab_size)
    options = GenerationOptions(max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
    in_host = SegmentStore(model)
    plain = Engine(model, ranks)

    def mapped() -> GenerationBatch:
        # A store of its own, so that nothing of it is in this process' memory yet.
        store = SegmentStore(model, folder, StoreLimits(host_bytes=0))
        return Engine(model, ranks, store=store).generate([prompt], options)

    variants: dict[str, Callable[[], GenerationBatch]] = {
        "bound": lambda: plain.generate([list(prompt.new_ids)], options),
        "host": lambda: Engine(model, ranks, store=in_host).generate([prompt], options),
        "disk": mapped,
    }
    if full:
        variants["full"] = lambda: plain.generate([prompt.ids], options)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for name in ("host", "disk"):  # encodes
        variants[name]()
    for _ in range(repeats):
        for name, run in variants.items():
            batch = run()
            reuse = batch.ranks[0].reuse
            runs[name].append(
                {"ttft_s": batch.ttft_s, "tpot_s": batch.tpot_s, "reuse": None if reuse is None else asdict(reuse)}
            )
    return {"point": asdict(point), "computed": len(prompt.new_ids), "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 2000, 4000, 8000], help="cached tokens")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--of", type=int, default=4064, help="tokens of the prompt whose cached share is varied")
    parser.add_argument("--new", type=int, default=64, help="new tokens behind so many cached ones")
    parser.add_argument("--modules", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", default=str(RESULTS))
    parser.add_argument("--plot-only", action="store_true", help="draw the newest lines of --results")
    options = parser.parse_args()
    if not options.plot_only:
        _run(options)
    found = [line for line in lines.read(options.results, kind="point") if line["kind"] == "ttft"]
    if not found:
        raise SystemExit(f"{options.results} has no lines to draw; leave out --plot-only")
    newest = [line for line in found if line["job"] == found[-1]["job"]]
    print(table(newest))
    write_whole(PICTURE, ttft_png(newest, options.of))


def _run(options: argparse.Namespace) -> None:
    by_length = [Point(length, options.new, options.modules) for length in options.lengths]
    cached = [round(share * options.of) for share in options.shares]
    by_share = [Point(each, options.of - each, options.modules) for each in cached if each]
    with Ranks.start(RanksOptions(threads=options.threads)) as ranks, tempfile.TemporaryDirectory() as folder:
        model = Model.load(ModelOptions(), ranks.device)
        shared = {
            "kind": "ttft",
            "job": now(),
            "commit": machine.commit(),
            "code": machine.code(),
            "hardware": machine.hardware(),
            "versions": library_versions(),
            "threads": options.threads,
            "model": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_bytes_per_token": sum(shape.bytes_per_token() for shape in model.kv_shapes),
            "link_tokens": LINK_TOKENS,
        }
        Engine(model, ranks).generate([list(range(64))], GenerationOptions(max_new_tokens=2))  # warm up
        for point in tqdm([*by_length, *by_share]):
            full = point in by_length
            line = shared | measure(model, ranks, point, Path(folder), options.repeats, full)
            lines.append(options.results, [line])


def ttft(line: lines.Line, variant: str) -> float | None:
    """The median in seconds."""
    runs = line["runs"].get(variant)
    return median(run["ttft_s"] for run in runs) if runs else None


def table(found: Sequence[lines.Line]) -> str:
    """Markdown: a row per point."""
    rows = [
        "| cached | new | computed | full prefill | host memory | speed-up | files | bound | lookup, host |",
        "|---" * 9 + "|",
    ]
    for line in found:
        point, host, full = line["point"], ttft(line, "host"), ttft(line, "full")
        looked = median(run["reuse"]["lookup_s"] for run in line["runs"]["host"])
        cells = [f"{point['cached']:,}", f"{point['new']:,}", f"{line['computed']:,}"]
        cells += ["" if full is None else f"{full:.2f} s", f"{host:.3f} s"]
        cells += ["" if full is None or host is None else f"{full / host:.1f}x"]
        cells += [f"{ttft(line, 'disk'):.3f} s", f"{ttft(line, 'bound'):.3f} s", f"{looked * 1e3:.1f} ms"]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
