"""Squeezed Attention on one level of clusters and on two: what a choice costs and finds, and what renewing costs.

    python -m benchmarks.studies.retrieval.squeezed_levels --lengths 2000 8000

One prompt, of which indices are made per variant. Then tokens of the text are decoded, and every fourth step measures
the attention probability of what was fetched. Times are those of all layers together: of a choice, of making an index
anew and of renewing its thresholds alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_samples import EXAMPLE, text_ids
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.retrieved_prompt import RetrievedPrompt, fetched_share
from policies.retriever import PromptView, Slots
from policies.squeezed_attention import SqueezedAttention
from policies.threshold_clusters import ThresholdClusters
from runahead import Model, ModelOptions
from runahead.cache.kept import KeptLayer
from runahead.conversation import Conversation
from runahead.retrieval.cache import RetrievedCache

VARIANTS: dict[str, dict[str, Any]] = {
    "one level": {},
    "two levels, coarse_quantile=0.3": {"coarse": 5, "coarse_quantile": 0.3},
    "two levels, coarse_quantile=0.5": {"coarse": 5, "coarse_quantile": 0.5},
    "two levels, coarse_quantile=0.7": {"coarse": 5, "coarse_quantile": 0.7},
}
TIMES = 5
"""Times that a choice is repeated, of which the median counts."""


def times_of(conversation: Conversation, policy: SqueezedAttention) -> dict[str, float]:
    """Seconds of a choice, of making an index anew and of renewing it, summed over layers; share of means compared."""
    assert isinstance(conversation.cache, RetrievedCache)
    seconds, compared = {"choose_s": 0.0, "anew_s": 0.0, "renew_s": 0.0}, list[float]()
    for layer, found in enumerate(conversation.cache.retrieval.layers):
        if found is None or found.observed_BNoH is None:
            continue
        index, kept = found.index, conversation.cache.layers[layer]
        assert isinstance(index, ThresholdClusters)
        k_BKnH, v_BKnV = kept.read()
        q_BNwH, num_slots = found.observed_BNoH, index.num_slots
        k_BKnH, v_BKnV = k_BKnH[:, :, :num_slots], v_BKnV[:, :, :num_slots]
        slots = Slots(num_slots=num_slots, pads=[0], positions_BKn=None, next_B=None)
        view = PromptView(
            layer=layer,
            num_layers=len(conversation.cache.layers),
            q_BNwH=q_BNwH,
            k_BKnH=k_BKnH,
            v_BKnV=v_BKnV,
            scaling=found.terms.scaling,
            softcap=None,
            positions_BKn=torch.arange(num_slots)[None, None],
            pads=[0],
            next_B=torch.tensor([num_slots]),
            turn=None,
            room=0,
            stored=partial(_keys, kept),
        )
        q_BNH = q_BNwH[:, :, -1]
        seconds["choose_s"] += median(_timed(lambda: policy.choose(index, q_BNH, slots)) for _ in range(TIMES))  # noqa: B023
        seconds["renew_s"] += _timed(lambda: index.set_least(view))  # noqa: B023
        seconds["anew_s"] += _timed(lambda: policy.index(view))  # noqa: B023
        compared.append(index.compared_share(q_BNH, slots))
    return seconds | {"compared": mean(compared)}


def _keys(kept: KeptLayer) -> Tensor:
    return kept.read()[0]


def _timed(call: Any) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length and variant."""
    options = run.options
    torch.set_num_threads(1)
    model = Model.load(ModelOptions(), torch.device("cpu"))
    text = text_ids(model, options.text)
    for length in options.lengths:
        ids = (text * ((length + options.tokens) // len(text) + 1))[: length + options.tokens]
        prompt = RetrievedPrompt(model, ids[:length])
        for name, more in VARIANTS.items():
            policy = SqueezedAttention(min_tokens=0, sample_every=4, quantile=options.quantile, max_fetch=1.0, **more)
            conversation = prompt.under(policy)
            conversation.follow(torch.tensor([ids[length:]]))
            assert isinstance(conversation.cache, RetrievedCache)
            report = conversation.cache.retrieval.report()
            yield {
                "model": model.name,
                "length": length,
                "quantile": options.quantile,
                "variant": name,
                "fetched": fetched_share(conversation.cache),
                "hit_mass": mean(each for each in report.hit_mass if each is not None),
                "index_bytes": sum(each.index.num_bytes for each in conversation.cache.retrieval.layers if each),
            } | times_of(conversation, policy)


def table(found: list[Line]) -> str:
    """Format a Markdown table, one row per length and variant, of the last lines of each."""
    rows: Rows = [("tokens", "", "means compared", "fetched", "hit mass", "index", "choice", "anew", "renewed")]
    for line in {(line["length"], line["quantile"], line["variant"]): line for line in found}.values():
        shares = f"{line['compared']:.0%}", f"{line['fetched']:.1%}", f"{line['hit_mass']:.1%}"
        times = f"{1e3 * line['choose_s']:.1f} ms", f"{line['anew_s']:.2f} s", f"{1e3 * line['renew_s']:.0f} ms"
        rows.append((f"{line['length']:,}", line["variant"], *shares, f"{line['index_bytes'] / 1e6:.1f} MB", *times))
    return markdown(rows, right=False)


STUDY = Study(
    name="retrieval.squeezed_levels",
    text=__doc__,
    has="hit_mass",
    measure=measure,
    table=table,
    options={
        "lengths": option([2000, 8000]),
        "tokens": option(16, "that are decoded"),
        "quantile": option(0.9, "of the tokens' scores"),
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
    },
)

if __name__ == "__main__":
    STUDY.main()
