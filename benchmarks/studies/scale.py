"""Plans for machines beyond this one: stages x shares, memory, TTFT and time per token, by python -m partitioner.plan.

    python -m benchmarks.studies.scale
    python -m benchmarks.studies.scale --draw-only

Makes every plan and rewrites benchmarks/results/scale.jsonl with a JSON line per plan; draws scale_plan.png in
docs/studies and writes the tables of docs/studies/scale.md from these lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tqdm import tqdm

from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_table import Rows, markdown
from partitioner.meshes.words import as_json, gib, nothing_fits
from partitioner.pictures.plan_picture import plan_png
from partitioner.plan import PLAN, plan_of
from runahead.picture_style import seconds, tokens

K = 1024
LENGTHS = [8 * K, 128 * K, 1024 * K]
MODELS = {"8B": "llama-8b", "70B": "llama-70b", "405B": "llama-405b"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A machine as options of the command, with the models and lengths that are planned for it."""

    name: str
    options: tuple[str, ...]
    models: tuple[str, ...] = ("8B", "70B")
    lengths: tuple[int, ...] = tuple(LENGTHS)


PLACES = [
    Place(name="8 x H100, NVLink", options=("gpus=8", "device=h100")),
    Place(
        name="4 nodes x 8 A100, 200 Gbit/s",
        options=("gpus=32", "nodes=4", "device=a100 80gb", "link.between=200Gbit/s"),
    ),
    Place(
        name="2 laptops, 1 Gbit/s",
        options=(
            *("gpus=2", "nodes=2", "memory=32GiB", "flops=1TFLOP/s", "bandwidth=80GB/s", "reserve=4GiB"),
            *("link.between=1Gbit/s", "link.between_us=200"),
        ),
    ),
    Place(
        name="16 nodes x 8 H100, 8 x 400 Gbit/s",
        options=(
            *("gpus=128", "nodes=16", "device=h100", "memory=192GiB", "link.between=400Gbit/s", "link.nics=8"),
            "ranks.tensor=8",
        ),
        models=("405B",),
        lengths=(1024 * K,),
    ),
]


def measure(run: Run) -> Iterator[Line]:
    """Make all plans; few of them with --quick."""
    wanted = [(place, model, length) for place in PLACES for model in place.models for length in place.lengths]
    if run.options.quick:
        wanted = [each for each in wanted if each[1] == "8B" and each[2] == LENGTHS[0]]
    for place, model, length in tqdm(wanted, unit="plan"):
        options = ["model=random", f"model.config=benchmarks/models/{MODELS[model]}.json", *place.options]
        options.append(f"tokens={length}")
        # The config is named as on the page, from the root of the repository.
        composed = [each.replace("model.config=", f"model.config={ROOT}/") for each in options]
        plan = plan_of(PLAN.compose(composed))
        about = {"place": place.name, "model": model, "tokens": length, "options": options}
        yield about | {"plan": as_json(plan), "nothing_fits": None if plan.best else nothing_fits(plan)}


HEAD = (
    "model",
    "tokens",
    "stages x shares",
    "decode",
    "share of each stage",
    "weights, KV, activations",
    "TTFT",
    "all-reduces, waits",
    "a token: last, sharded",
    "next best",
)


def tables(lines: list[Line]) -> str:
    """A table per machine."""
    parts = []
    for place in dict.fromkeys(line["place"] for line in lines):
        of_place = [line for line in lines if line["place"] == place]
        options = of_place[0]["options"][2:-1]
        command = " ".join(f"'{each}'" if " " in each else each for each in options)
        rows: Rows = [HEAD, *(_row(line) for line in of_place)]
        parts.append(f"### {place}\n\n    {command}\n\n{markdown(rows, right=False)}")
    return "\n".join(parts)


def _row(line: Line) -> tuple[str, ...]:
    about = line["model"], tokens(line["tokens"])
    plan, candidates = line["plan"], line["plan"]["candidates"]
    best = candidates[0]
    if line["nothing_fits"] is not None:
        need = max(each["total"] for each in best["memory"])
        least = plan["least_gpus"]
        more = "" if least is None else f"; {least} such GPUs would do"
        return (*about, "nothing fits", "", "", f"at least {gib(need)} a GPU{more}", "", "", "", "")
    memory = max(best["memory"], key=lambda each: each["total"])
    spent, total_s = best["ttft_parts_s"], best["ttft_s"]
    per_token = seconds(best["tpot_last_s"])
    if best["stages"] > 1:
        per_token += f", {seconds(best['tpot_sharded_s'])}"
    other = next(iter(candidates[1:]), None)
    return (
        *about,
        _mesh(best),
        best["decode"],
        _shares(best["boundaries"]) + ("" if best["best_split"] else " (evener, to fit)"),
        ", ".join(gib(memory[name]) for name in ("weights", "kv", "activations")),
        seconds(total_s),
        f"{spent['allreduce'] / total_s:.0%}, {spent['wait'] / total_s:.0%}",
        per_token,
        "" if other is None else f"{_mesh(other)}: {other['why_not']}",
    )


def _mesh(candidate: dict[str, Any]) -> str:
    pieces = candidate["chunk_tokens"]
    return f"{candidate['stages']} x {candidate['shares']}" + (f", pieces of {tokens(pieces)}" if pieces else "")


def _shares(boundaries: list[int]) -> str:
    """The share of each stage, or of the first and the last of many."""
    each = [f"{(end - start) / boundaries[-1]:.3f}" for start, end in pairwise(boundaries)]
    return ", ".join(each if len(each) <= 4 else [*each[:2], "...", each[-1]])


SHOWN = "4 nodes x 8 A100, 200 Gbit/s", "70B", 128 * K
"""The plan that is drawn: machine, model and tokens."""


def picture(lines: list[Line]) -> bytes | None:
    """Draw one plan with all its candidates; None if the lines do not have it."""
    shown = [line for line in lines if (line["place"], line["model"], line["tokens"]) == SHOWN]
    return plan_png(shown[0]["plan"]) if shown else None


STUDY = Study(
    name="scale",
    text=__doc__,
    has="place",
    measure=measure,
    table=tables,
    options={"quick": option(False, "a few plans, to see that everything runs")},
    pictures={"scale_plan.png": picture},
    page="scale.md",
    replaces=True,
)

if __name__ == "__main__":
    STUDY.main()
