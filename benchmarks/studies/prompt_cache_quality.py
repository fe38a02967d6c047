"""Quality cost of module reuse: plain prompts, independent modules, link tokens, blends, a sink prefix, scaffolds.

    python -m benchmarks.studies.prompt_cache_quality

Measures three tasks on a real model, each with a context that is cut into modules. Perplexity: of the text that
follows. Copy-NLL: the loss of a passage of the first module, repeated after the last one. Keys: every document states a
number, and one of them is asked for. Prints a table and appends JSON lines.
"""

# Legend: C new tokens, V vocabulary.

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

import torch
from torch import Tensor

from benchmarks.evaluation.tasks.retrieval import number_in
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, last_run, option
from benchmarks.harness.text_samples import EXAMPLE, text_ids
from benchmarks.harness.text_table import Rows, markdown
from policies.reuse import ReusingPrompt, Segment, SegmentUse
from runahead import (
    ContextPartition,
    Engine,
    GenerationOptions,
    Model,
    ModelOptions,
    PrefillOptions,
    Ranks,
    RanksOptions,
)
from runahead.cache.attention import CausalAttention
from runahead.prefill import PrefillJob, PromptBatch
from runahead.prefill.kv_runahead import run_in_chain
from runahead.reuse.blend import shares_by_layer
from runahead.reuse.reuse import Reuse
from runahead.reuse.store import SegmentStore

PASSAGE, FOLLOWING = 128, 128
CONTEXT = 768
PEOPLE = ("Alice", "Bertram", "Clara", "Daniel", "Edith", "Frank", "Grace", "Henry")


LAYERS = 30
"""Layers of SmolLM2-135M."""


@dataclass(frozen=True)
class Variant:
    """Encoding of modules, and what is computed again of all but the first.

    Attributes:
        link: first tokens of each that are computed again.
        link_share: the same as a share of its tokens.
        blend: share of the others that later layers compute (policy.recompute).
        sinks: first tokens that all modules see.
        joint: they are encoded as one.
    """

    name: str
    link: int = 0
    link_share: float = 0.0
    blend: float = 0.0
    sinks: int = 0
    joint: bool = False


def equal_work(blend: float) -> tuple[Variant, Variant]:
    """A blend, and link tokens of which as many are computed again: first layers of a blend compute all tokens."""
    computed = mean(shares_by_layer(blend, LAYERS))
    return (
        Variant(f"blend of {blend:.0%}, which is {computed:.0%} computed again", blend=blend),
        Variant(f"link tokens, {computed:.0%} computed again", link_share=computed),
    )


VARIANTS = (
    Variant("plain, or a scaffold", joint=True),
    Variant("independent"),
    *(Variant(f"{count} link token{'s' if count > 1 else ''}", link=count) for count in (1, 2, 4, 8, 16)),
    *equal_work(0.05),
    *equal_work(0.15),
    Variant("4 link tokens, blend of 5%", link=4, blend=0.05),
    Variant("sink prefix of 4", sinks=4),
    Variant("sink prefix of 4, 1 link token", sinks=4, link=1),
    Variant("sink prefix of 4, 4 link tokens", sinks=4, link=4),
)


def cut(
    ids: Sequence[int], edges: Sequence[int], new: Sequence[int], variant: Variant, *, last: bool = True
) -> ReusingPrompt:
    """Cut a context into modules at these edges, with new tokens after it; `last`: its last token counts as new."""
    again, blended_at = {len(ids) - 1} if last else set[int](), set[int]()
    uses, blended = list[SegmentUse](), list[SegmentUse]()
    spans = [(0, len(ids))] if variant.joint else list(pairwise(edges))
    for start, end in spans:
        sinks = min(variant.sinks, start)
        segment = Segment(
            name=f"{start} to {end}",
            ids=tuple(ids[start:end]),
            positions=tuple(range(start, end)),
            context_ids=tuple(ids[:sinks]),
            context_positions=tuple(range(sinks)),
        )
        link = variant.link + round(variant.link_share * (end - start))
        again |= set(range(start, min(start + link, end))) if start else set()
        kept = [position - start for position in range(start, end) if position not in again]
        if kept:
            use = SegmentUse(segment=segment, parts=(range(kept[0], kept[-1] + 1),))
            (blended if start and variant.blend else uses).append(use)
            blended_at |= {start + index for index in kept} if start and variant.blend else set()
    positions = [*sorted(again | blended_at), *range(len(ids), len(ids) + len(new))]
    every = [*ids, *new]
    new_ids = tuple(every[position] for position in positions)
    return ReusingPrompt(
        uses=tuple(uses),
        new_ids=new_ids,
        new_positions=tuple(positions),
        blended=tuple(blended),
        share=variant.blend if blended else 0.0,
    )


@torch.inference_mode()
def loss(model: Model, ranks: Ranks, store: SegmentStore, prompt: ReusingPrompt, num_last: int) -> float:
    """Mean loss of the prompt's last tokens, in nats per token. They and one before them follow all modules."""
    start = len(prompt.new_ids) - num_last - 1
    context = replace(prompt, new_ids=prompt.new_ids[:start], new_positions=prompt.new_positions[:start])
    reuse = Reuse([context], store, model, ranks)
    reuse.encode_missing()
    job = PrefillJob(
        model=model,
        ranks=ranks,
        batch=PromptBatch.of([list(context.new_ids)], model.device),
        partition=ContextPartition(boundaries=(0, start)),
        capacity=len(prompt.new_ids),
        options=PrefillOptions(),
        reused=reuse.fetch(),
    )
    cache = run_in_chain(job).cache
    assert cache is not None
    attention = CausalAttention(cache, start=start, pads=[0])
    ids_1C = torch.tensor([prompt.new_ids[start:]], device=model.device)
    logits_CV: Tensor = model.forward(ids_1C, attention, start=start, pads=[0], all_logits=True)[0]
    return torch.nn.functional.cross_entropy(logits_CV[:-1], ids_1C[0, 1:]).item()


def edges_of(num_tokens: int, modules: int) -> list[int]:
    return [round(number * num_tokens / modules) for number in range(modules + 1)]


Measure = Callable[[int, Variant, SegmentStore], float]
"""Function of (sample, variant, store of segments already encoded) that returns a value."""


def text_loss(model: Model, ranks: Ranks, ids: list[int], modules: int, samples: int, kind: str) -> Measure:
    """Make a measure of the loss of the repeated passage, or of the text that follows."""
    apart = (len(ids) - CONTEXT - FOLLOWING) // max(1, samples - 1)

    def measure(sample: int, variant: Variant, store: SegmentStore) -> float:
        window = ids[sample * apart : sample * apart + CONTEXT + FOLLOWING]
        context, following = window[:CONTEXT], window[CONTEXT:]
        new = context[:PASSAGE] if kind == "copy" else following
        prompt = cut(context, edges_of(CONTEXT, modules), new, variant)
        # The end of the context does not predict the first token, which is left out.
        return loss(model, ranks, store, prompt, len(new) - 1)

    return measure


def key_hit(model: Model, ranks: Ranks, text: list[int], count: int) -> Measure:
    """Make a measure on a context of documents, each a module: 1 if the answer contains the number, else 0."""

    def encode(told: str) -> list[int]:
        ids: list[int] = model.tokenizer(told, add_special_tokens=False).input_ids
        return ids

    def measure(sample: int, variant: Variant, store: SegmentStore) -> float:
        draw = random.Random(f"{count} {sample}")
        people = draw.sample(PEOPLE, count)
        keys = {person: str(draw.randrange(10000, 100000)) for person in people}
        ids, edges = list[int](), [0]
        for person in people:
            start = draw.randrange(len(text) - 200)
            told = f"\n\nThe number of {person} is {keys[person]}."
            ids += [*encode(f"\n\nA letter of {person}.\n"), *text[start : start + 120], *encode(told)]
            edges.append(len(ids))
        asked = draw.choice(people)
        question = encode(f"\n\nQuestion: What is the number of {asked}?\nAnswer: The number of {asked} is")
        engine = Engine(model, ranks, store=store)
        prompt = cut(ids, edges, question, variant)
        [generation] = engine.generate([prompt], GenerationOptions(max_new_tokens=6)).generations
        return float(number_in(generation.text) == keys[asked])

    return measure


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per task and variant."""
    options = run.options
    with Ranks.start(RanksOptions(threads=1)) as ranks:
        model = Model.load(ModelOptions(), ranks.device)
        ids = text_ids(model, options.text)
        tasks: dict[str, tuple[int, Measure]] = {}
        for modules in (3, 6):
            for kind in ("perplexity", "copy"):
                loss_of = text_loss(model, ranks, ids, modules, options.samples, kind)
                tasks[f"{kind}, {modules} modules"] = options.samples, loss_of
        for count in (4, 8):
            tasks[f"numbers told, {count} documents"] = options.questions, key_hit(model, ranks, ids, count)
        shared = {"model": model.name, "dtype": str(model.dtype).removeprefix("torch.")}
        for task, (num_samples, value_of) in tasks.items():
            values: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
            for sample in run.bar(range(num_samples), task):
                store = SegmentStore(model)
                for variant in VARIANTS:
                    values[variant.name].append(value_of(sample, variant, store))
            for name, each in values.items():
                yield shared | {"task": task, "variant": name, "values": each}


def table(found: list[Line]) -> str:
    """Format a Markdown table, one row per variant of the last run."""
    results = last_run(found)
    values = {(line["variant"], line["task"]): mean(line["values"]) for line in results}
    tasks = list(dict.fromkeys(line["task"] for line in results))
    rows: Rows = [("", *tasks)]
    for variant in dict.fromkeys(line["variant"] for line in results):
        rows.append((variant, *(_cell(task, values[variant, task]) for task in tasks)))
    return markdown(rows, right=False)


def _cell(task: str, value: float) -> str:
    if task.startswith("perplexity"):
        return f"{math.exp(value):.1f}"
    return f"{value:.2f}" if task.startswith("copy") else f"{value:.0%}"


STUDY = Study(
    name="prompt_cache_quality",
    text=__doc__,
    has="values",
    measure=measure,
    table=table,
    options={
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
        "samples": option(8, "of perplexity and copy-NLL"),
        "questions": option(16, "for each number of documents"),
    },
)

if __name__ == "__main__":
    STUDY.main()
