"""How much faster are rows decoded that share a prompt, if each step reads its keys and values once for all of them?

    python -m benchmarks.studies.shared_decoding --shared 6000 --rows 8

All rows of one forward go on after the same prompt. With `shared` the queries of all rows attend to it in one product
(runahead/reuse/rows.py), as rows of a server do that found the same prefix or are answers to one prompt. With `own`
every row has keys and values of its own, as without a prefix tree. Both decode the same tokens, a few in turn, round
after round (A B A B), and their logits are compared.

The bound is in bytes, since a step reads each of them once: the weights, and the prompt once or once per row. Its gain
is the ratio of the two. Appends a JSON line per length and number of rows to benchmarks/results/shared_decoding.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option
from benchmarks.harness.text_samples import EXAMPLE, repeated, text_ids
from benchmarks.harness.text_table import Rows
from benchmarks.studies.retrieved_prompt import kv_bytes, weight_bytes
from launch.program.text_table import text_table
from runahead import ContextPartition, Engine, Model, ModelOptions, Ranks
from runahead.cache.base import KVStore
from runahead.cache.rows import RowsCache
from runahead.config import Device, RanksOptions
from runahead.decoding.forward import forward_over
from runahead.reuse.forks import fork
from runahead.reuse.rows import rows_cache


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length of the prompt and number of rows."""
    options = run.options
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    model = Model.load(ModelOptions(), ranks.device)
    engine = Engine(model, ranks)
    text = text_ids(model, options.text)
    for num_shared in options.shared:
        ids = repeated(text, num_shared)  # time does not depend on the text
        whole = ContextPartition(boundaries=(0, num_shared))
        prefilled = engine.prefill_part([ids], whole, num_new=options.tokens + 1)
        assert prefilled.cache is not None
        [prompt] = prefilled.cache.for_decoding().split([0])
        for num_rows in options.rows:
            line = {"model": model.name, "rows": num_rows, "shared_tokens": num_shared, "tokens": options.tokens}
            yield line | _measured(run, model, prompt, num_shared, num_rows)


@torch.inference_mode()
def _measured(run: Run, model: Model, prompt: KVStore, num_shared: int, num_rows: int) -> Line:
    """Seconds of steps with and without sharing, and the bytes that each reads in the middle one.

    Args:
        prompt: its cache, which has room for the tokens of a turn.
    """
    tokens, pads = run.options.tokens, [0] * num_rows
    together, num_together = fork(prompt, num_rows, model, num_tokens=num_shared, num_new=tokens)
    assert num_together == num_shared, "this model's rows do not share a prompt"
    apart = [prompt.fork() for _ in range(num_rows)]
    logits: dict[str, torch.Tensor] = {}

    def turn(name: str, cache: KVStore, start: int) -> Callable[[int], float]:
        forward = forward_over(model, cache, [], pads=pads, prompt_tokens=start)

        def seconds(number: int) -> float:
            """Seconds of a step. Every turn stores its tokens in the same places."""
            began_s = time.perf_counter()
            for step in range(tokens):
                ids_B1 = 50 + 10 * number + step + torch.arange(num_rows)[:, None]
                logits[name] = forward(ids_B1 % model.vocab_size, start + step)
            return (time.perf_counter() - began_s) / tokens

        return seconds

    turns = {
        "shared": turn("shared", rows_cache(together, pads), 0),
        "own": turn("own", RowsCache(apart, pads), num_shared),
    }
    step_s = run.in_turn(turns, run.options.rounds, warmup=1)
    new_bytes = num_rows * (tokens // 2 + 1) * kv_bytes(model, 1)
    common = weight_bytes(model) + new_bytes
    return {
        "step_s": step_s,
        "bytes": {
            "shared": common + num_shared * kv_bytes(model, 1),
            "own": common + num_rows * num_shared * kv_bytes(model, 1),
        },
        "largest_difference": float((logits["shared"] - logits["own"]).abs().max()),
    }


def table(found: list[Line]) -> str:
    """Rows of the last runs, one per length and number of rows."""
    rows: Rows = [
        ("rows", "shared", "tokens/s", "without", "gain", "from", "to", "bound", "reached", "logits differ by")
    ]
    for line in newest(found, "model", "rows", "shared_tokens").values():
        shared_s, own_s = line["step_s"]["shared"], line["step_s"]["own"]
        gains = [own / shared for own, shared in zip(own_s, shared_s, strict=True)]
        gain, bound = median(gains), line["bytes"]["own"] / line["bytes"]["shared"]
        rows.append(
            (
                str(line["rows"]),
                f"{line['shared_tokens']:,}",
                *(f"{line['rows'] / median(step_s):.1f}" for step_s in (shared_s, own_s)),
                *(f"{each:.2f}" for each in (gain, min(gains), max(gains), bound)),
                f"{(gain - 1) / (bound - 1):.0%}",
                f"{line['largest_difference']:.1e}",
            )
        )
    return text_table(rows)


STUDY = Study(
    name="shared_decoding",
    text=__doc__,
    has="shared_tokens",
    measure=measure,
    table=table,
    options={
        "shared": option([6000], "tokens of the prompt"),
        "rows": option([8], "that are decoded together"),
        "tokens": option(4, "of one turn"),
        "rounds": option(9),
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
    },
)

if __name__ == "__main__":
    STUDY.main()
