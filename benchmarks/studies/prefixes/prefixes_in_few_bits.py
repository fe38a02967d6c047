"""Loss of a text after a prefix that came from 4 or 2 bits.

    python -m benchmarks.studies.prefixes.prefixes_in_few_bits

The text that follows the prefix, and a passage from its beginning that is repeated after it (copy-NLL). The prefix is
encoded once for each precision, stored in host memory and found there by the prompt, whose own tokens are exact.
Appends a JSON line per task and precision to benchmarks/results/prefixes_in_few_bits.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.evaluation.difference import Difference
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, last_run, option
from benchmarks.harness.text_samples import EXAMPLE, text_ids
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.prompt_cache_quality import CONTEXT, FOLLOWING, PASSAGE, Variant, cut, loss
from runahead import Model, ModelOptions, Ranks, RanksOptions
from runahead.config import BITS
from runahead.reuse.store import SegmentStore

PREFIX = Variant("prefix", joint=True)
TASKS = ("following text", "copy")
PRECISIONS = (None, *BITS)


def measure(run: Run) -> Iterator[Line]:
    """A line per task and precision, with the loss of each sample."""
    options = run.options
    with Ranks.start(RanksOptions(threads=options.threads)) as ranks:
        model = Model.load(ModelOptions(), ranks.device)
        ids = text_ids(model, options.text)
        apart = (len(ids) - CONTEXT - FOLLOWING) // max(1, options.samples - 1)
        for task in TASKS:
            values: dict[int | None, list[float]] = {bits: [] for bits in PRECISIONS}
            for sample in run.bar(range(options.samples), task):
                window = ids[sample * apart : sample * apart + CONTEXT + FOLLOWING]
                context, following = window[:CONTEXT], window[CONTEXT:]
                new = context[:PASSAGE] if task == "copy" else following
                prompt = cut(context, [0, CONTEXT], new, PREFIX)
                for bits in PRECISIONS:
                    # The end of the prefix does not predict the first token of a passage, which is left out.
                    values[bits].append(loss(model, ranks, SegmentStore(model, bits=bits), prompt, len(new) - 1))
            for bits, each in values.items():
                yield {
                    "task": task,
                    "bits": bits,
                    "model": model.name,
                    "dtype": str(model.dtype).removeprefix("torch."),
                    "token_bytes": SegmentStore(model, bits=bits).stored_token_bytes,
                    "losses": each,
                }


def table(found: list[Line]) -> str:
    """Mean loss by task and precision, with the paired difference to the exact prefix and its 95% interval."""
    lines = {(line["task"], line["bits"]): line for line in last_run(found)}
    rows: Rows = [("stored", "bytes per token", *TASKS)]
    for bits in PRECISIONS:
        cells = list[str]()
        for task in TASKS:
            losses, exact = lines[task, bits]["losses"], lines[task, None]["losses"]
            cells.append(f"{mean(losses):.3f}" if bits is None else _difference(losses, exact))
        size = f"{lines[TASKS[0], bits]['token_bytes']:,}"
        rows.append(("as computed" if bits is None else f"{bits} bits", size, *cells))
    return markdown(rows, right=False)


def _difference(losses: list[float], exact: list[float]) -> str:
    found = Difference.of([ours - theirs for ours, theirs in zip(losses, exact, strict=True)])
    return found.told("{:+.3f}".format)


STUDY = Study(
    name="prefixes.prefixes_in_few_bits",
    text=__doc__,
    has="losses",
    measure=measure,
    table=table,
    options={
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
        "samples": option(16, "of each task"),
        "threads": option(1),
    },
)

if __name__ == "__main__":
    STUDY.main()
