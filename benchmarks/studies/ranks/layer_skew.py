"""What do two ranks do during a prefill, and how long does one of them take alone? README's first picture.

    torchrun --nproc-per-node=2 -m benchmarks.studies.ranks.layer_skew --out docs

Computes a prompt on the last rank alone and then on all ranks, by the split of a table of the partitioner, once to warm
up and once with a timeline. Appends a JSON line with the timelines to benchmarks/results/layer_skew.jsonl, and draws
layer_skew.png from the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import pairwise

from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_samples import EXAMPLE, repeated, text_ids
from partitioner.table.lookup_table import LookupTable
from runahead import Engine, GenerationOptions, Model, ModelOptions, Ranks, RanksOptions
from runahead.context import ContextPartition
from runahead.timeline.picture import timeline_png
from runahead.timeline.trace import Span


def measure(run: Run) -> Iterator[Line]:
    """One line with both timelines."""
    length = run.options.length
    with Ranks.start(RanksOptions(threads=1)) as ranks:
        if ranks.size < 2:
            raise SystemExit("the layer skew is between ranks; use torchrun --nproc-per-node=2")
        model = Model.load(ModelOptions(), ranks.device, ranks_on_host=ranks.local_size)
        prompt = repeated(text_ids(model, EXAMPLE), length)
        alone = ContextPartition(boundaries=(0,) * ranks.size + (length,))
        split = LookupTable.load(run.options.table).lookup(length, ranks.size)
        made = {}
        for name, partition in (("alone", alone), ("together", split)):
            engine = Engine(model, ranks, partition=partial(_chosen, partition))
            for record_timeline in (False, True):
                batch = engine.generate([prompt], GenerationOptions(max_new_tokens=1), record_timeline=record_timeline)
            spans = batch.spans[-1:] if name == "alone" else batch.spans
            made[name] = {"ttft_s": batch.ttft_s, "spans": [[asdict(span) for span in of_rank] for of_rank in spans]}
        chunks = [end - start for start, end in pairwise(split.boundaries)]
        yield {"length": length, "chunks": chunks, "model": model.name, **made}


def _chosen(partition: ContextPartition, num_tokens: int, num_ranks: int) -> ContextPartition:
    """The same partition for every prompt, as a partitioner."""
    return partition


def table(found: list[Line]) -> str:
    """TTFT of the last line, together and alone."""
    line = found[-1]
    alone_s, together_s = line["alone"]["ttft_s"], line["together"]["ttft_s"]
    return (
        f"{_prompt(line)}: {together_s:.3g} s to the first token, on one rank alone {alone_s:.3g} s, which is "
        f"{alone_s / together_s:.2f} times as long"
    )


def _prompt(line: Line) -> str:
    return f"{line['model']}, {' + '.join(f'{chunk:,}' for chunk in line['chunks'])} tokens"


def picture(found: list[Line]) -> bytes:
    """Draw the ranks of the last line below the bar of one rank alone."""
    line = found[-1]
    alone, together = (
        [[Span(**span) for span in of_rank] for of_rank in line[name]["spans"]] for name in ("alone", "together")
    )
    return timeline_png(
        together,
        ttft_s=line["together"]["ttft_s"],
        alone=(alone[0], line["alone"]["ttft_s"]),
        subject=f"{_prompt(line)}, a core per rank, commit {line['commit']}",
    )


STUDY = Study(
    name="ranks.layer_skew",
    text=__doc__,
    has="together",
    measure=measure,
    table=table,
    pictures={"layer_skew.png": picture},
    options={
        "length": option(4096, "tokens of the prompt"),
        "table": option(str(ROOT / "tables" / "smollm2-cpu-2.json"), "of the partitioner, for the split"),
    },
)

if __name__ == "__main__":
    STUDY.main()
