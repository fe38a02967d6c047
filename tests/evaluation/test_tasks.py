"""Measurements of the tasks, against transformers' own logits and by what must hold for any model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.evaluation.contenders import Contender, contenders
from benchmarks.evaluation.material import Material, Text
from benchmarks.evaluation.options import (
    CopyOptions,
    EvaluateRun,
    PerplexityOptions,
    Question,
    RetrievalOptions,
    ThroughputOptions,
)
from benchmarks.evaluation.tasks import TASKS, CopyTask, Needle, Passkey, Perplexity, Throughput
from benchmarks.evaluation.tasks.base import PROBE_TOKENS, Outcome, Runtime, Task
from benchmarks.evaluation.tasks.retrieval import NumberRetrieval, number_in
from runahead import Conversation, Model, Ranks, RanksOptions
from runahead.config import Device

SNAPKV = {"name": "snapkv", "window": 4, "kernel": 3}
PYRAMID = {"name": "pyramidinfer", "min_tokens": 8}
CLOSE = 2e-4
"""Relative, of a mean of NLLs: rounding in float32 of a tiny model with large weights."""


@pytest.fixture(scope="module")
def runtime(model: Model) -> Runtime:
    return Runtime(model=model, ranks=Ranks.start(RanksOptions(device=Device.cpu, threads=1)))


def contender(entry: Any, budget: float = 0.5) -> Contender:
    [found] = contenders([entry], [budget])
    return found


def oracle_nll(folder: Path, ids: list[int]) -> torch.Tensor:
    """Negative log-likelihood of all tokens but the first, by transformers alone."""
    module = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits_SV = module(input_ids=torch.tensor([ids])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits_SV, torch.tensor(ids[1:]), reduction="none")


@pytest.mark.parametrize("chunk", [1, 30, 100])
def test_perplexity_of_the_full_cache_is_the_models_own(
    chunk: int, runtime: Runtime, material: Material, folder: Path
) -> None:
    task = Perplexity(EvaluateRun(perplexity=PerplexityOptions(tokens=100, chunk=chunk, samples=2)), material)
    for case in task.cases:
        ids = material.text_ids[100 * case["sample"] :][:100]
        outcome = task.run(runtime, contender("full"), case)
        assert outcome.score == pytest.approx(oracle_nll(folder, ids).mean().exp().item(), rel=20 * CLOSE)
        assert outcome.weight == 99
        assert outcome.kv.kept_tokens == [100] * runtime.model.num_layers


@pytest.mark.parametrize("entry", [SNAPKV, PYRAMID, "streaming_llm", "h2o"], ids=str)
def test_the_policy_is_at_work_from_the_first_chunk_on(entry: Any, runtime: Runtime, material: Material) -> None:
    task = Perplexity(EvaluateRun(perplexity=PerplexityOptions(tokens=120, chunk=40)), material)
    full, half, all_of_it = (
        task.run(runtime, each, {"sample": 0})
        for each in (contender("full"), contender(entry, 0.5), contender(entry, 1.0))
    )
    assert all_of_it.score == pytest.approx(full.score, rel=20 * CLOSE)
    assert abs(math.log(half.score / full.score)) > 10 * CLOSE
    share = half.kv.kv_bytes / half.kv.full_kv_bytes
    assert 0.45 < share < 0.65  # positions and carried votes are allocated too


def test_tokens_of_a_chunk_see_their_own_chunk_whole(runtime: Runtime, material: Material, folder: Path) -> None:
    """So a single chunk is the model's own perplexity under any policy, those that drop hidden states among them."""
    task = Perplexity(EvaluateRun(perplexity=PerplexityOptions(tokens=80, chunk=80)), material)
    own = oracle_nll(folder, material.text_ids[:80]).mean().exp().item()
    for entry in (SNAPKV, PYRAMID):
        assert task.run(runtime, contender(entry, 0.3), {"sample": 0}).score == pytest.approx(own, rel=20 * CLOSE)


def test_perplexities_of_samples_are_combined_by_token() -> None:
    assert Perplexity.metric.combine([math.exp(1.0), math.exp(3.0)], [30, 10]) == pytest.approx(math.exp(1.5))


def test_copy_nll_of_the_full_cache_is_the_models_own(runtime: Runtime, material: Material, folder: Path) -> None:
    task = CopyTask(EvaluateRun(copy=CopyOptions(passage=20, filler=50, samples=3)), material)
    starts = []
    for case in task.cases:
        context, passage = task._contexts[case["sample"]], task._passages[case["sample"]]
        assert len(context) == 70 and context[:20] == passage
        starts.append(next(at for at in range(400) if material.text_ids[at : at + 70] == context))
        outcome = task.run(runtime, contender("full"), case)
        own = oracle_nll(folder, context + passage)[-20:].mean().item()
        assert outcome.score == pytest.approx(own, rel=10 * CLOSE)
        assert outcome.kv.num_tokens == 70
    assert starts == [0, 70, 140]


def test_the_loss_of_the_text_that_follows_is_measured_in_place_of_the_passage(
    runtime: Runtime, material: Material, folder: Path
) -> None:
    """The text does not follow the passage. A policy that retrieves is fed token by token, and tells what it found."""
    task = CopyTask(
        EvaluateRun(copy=CopyOptions(passage=20, filler=50, following=15, samples=1, timed=False)), material
    )
    [case], read = task.cases, material.text_ids[:85]
    entry = {"name": "quest", "page": 4, "fetch": 0.3, "first_layer": 0, "sample_every": 1}
    full, some = (outcome for _, outcome in task.run_all(runtime, [contender("full"), contender(entry)], case))
    own = oracle_nll(folder, read)[-15:].mean().item()
    assert full.details["following_nll"] == pytest.approx(own, rel=10 * CLOSE)
    assert full.tpot_s is None and full.details["hit_mass"] is None and full.seen_share == 1.0
    assert 0 < some.details["hit_mass"] < 1 and some.seen_share < 0.5
    assert some.details["following_nll"] != full.details["following_nll"]


def test_runs_with_other_numbers_of_samples_share_those_in_the_same_places(material: Material) -> None:
    """Settings are equal exactly where a sample with the same number is the same text."""

    def task(filler: int, samples: int) -> CopyTask:
        options = CopyOptions(passage=5, filler=filler, samples=samples)
        return CopyTask(EvaluateRun(copy=options), replace(material, max_positions=None))

    few, more = task(45, 2), task(45, 4)
    assert few.settings == more.settings and few._contexts == more._contexts[:2]
    close, closer = (task(len(material.text_ids) - 105, samples) for samples in (3, 5))
    assert close.settings != closer.settings and close._contexts != closer._contexts[:3]


def test_samples_of_a_short_text_overlap_but_their_passages_do_not(material: Material) -> None:
    material = replace(material, max_positions=None)
    num_tokens = len(material.text_ids)
    options = CopyOptions(passage=30, filler=num_tokens - 30 - 100, samples=3)
    task = CopyTask(EvaluateRun(copy=options), material)
    assert len({tuple(passage) for passage in task._passages}) == 3
    assert all(len(context) == num_tokens - 100 for context in task._contexts)
    with pytest.raises(
        ValueError, match=r"text.file=sea.txt has .* tokens but copy needs .* fewer than copy.samples=9"
    ):
        CopyTask(EvaluateRun(copy=CopyOptions(passage=30, filler=num_tokens - 130, samples=9)), material)


@pytest.mark.parametrize("kind", [Passkey, Needle])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_fact_is_at_its_depth_and_the_length_is_kept(
    kind: type[NumberRetrieval], depth: float, material: Material
) -> None:
    options = RetrievalOptions(lengths=[200, 400], depths=[depth], samples=2)
    task = kind(EvaluateRun(passkey=options, needle=options), material)
    keys = set()
    for case in task.cases:
        item = task.item(case)
        context, question, key = item.context, item.question, item.details["key"]
        told = material.tokenizer.decode(context)
        keys.add(key)
        assert 0.8 * case["length"] < len(context) + len(question) <= case["length"]
        assert told.count(task.fact.format(key=key)) == 1 and task.asked not in told
        before, _, after = [len(material.ids(part)) for part in told.partition(task.fact.format(key=key))]
        assert abs(before / (before + after) - depth) < 0.2
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("answer", "number"),
    [(" 12345", "12345"), (" 12345. The sky", "12345"), (": **12345**", "12345"), (" 123456", "123456"), (" no", None)],
)
def test_the_first_number_answers(answer: str, number: str | None) -> None:
    assert number_in(answer) == number


@pytest.mark.parametrize("question", Question)
@pytest.mark.parametrize("offset", [0, 1])
def test_found_is_what_the_answer_says(
    question: Question, offset: int, runtime: Runtime, material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's part is played: what it is fed is written down, and it answers the key, or the key plus one."""
    options = RetrievalOptions(lengths=[200], depths=[0.5], question=question)
    task = Passkey(EvaluateRun(passkey=options), material)
    item = task.item(task.cases[0])
    context, asked, key = item.context, item.question, item.details["key"]
    fed: list[tuple[list[int], bool]] = []
    feed, generate = Conversation.feed, Conversation.generate

    def noted(self: Conversation, ids_BC: torch.Tensor, *, cut_back: bool = True, **other: Any) -> torch.Tensor:
        fed.append((ids_BC[0].tolist(), cut_back))
        return feed(self, ids_BC, cut_back=cut_back, **other)

    def played(self: Conversation, *args: Any) -> Any:
        decoded = generate(self, *args)
        decoded.rows[0].new_ids = material.ids(f" {key + offset}. The")
        return decoded

    monkeypatch.setattr(Conversation, "feed", noted)
    monkeypatch.setattr(Conversation, "generate", played)
    outcome = task.run(runtime, contender(SNAPKV), task.cases[0])
    assert outcome.score == float(offset == 0)
    separate = [(context, True), (asked, False)]
    reference = (material.ids(item.reference), True)  # in a fork, to which no policy applies
    assert fed == [*(separate if question is Question.separate else [(context + asked, True)]), reference]
    assert outcome.kv.num_tokens == len(context) + (0 if question is Question.separate else len(asked))


def test_the_largest_batch_that_fits_is_used(runtime: Runtime, material: Material) -> None:
    options = ThroughputOptions(prompt_tokens=96, new_tokens=4, kv_tokens=2000, rounds=1)
    task = Throughput(EvaluateRun(throughput=options), material)
    full, thinned = (task.run(runtime, each, {"round": 0}) for each in (contender("full"), contender(SNAPKV, 0.25)))
    per_token = sum(shape.bytes_per_token() for shape in runtime.model.kv_shapes)
    assert full.details["rows"] == 2000 // 99  # the last token's K,V are never computed
    assert (
        full.details["peak_bytes"] == full.kv.kv_bytes == full.kv.full_kv_bytes == full.details["rows"] * 99 * per_token
    )
    assert thinned.details["rows"] > full.details["rows"]
    for outcome in (full, thinned):
        used, rows = outcome.details["peak_bytes"], outcome.details["rows"]
        assert used <= 2000 * per_token < used * (rows + 1) / rows
        seconds = outcome.ttft_s + (outcome.tpot_s or 0) * 3
        assert outcome.score == pytest.approx(rows * 4 / seconds)


def test_a_budget_without_room_for_a_row_is_told(runtime: Runtime, material: Material) -> None:
    task = Throughput(EvaluateRun(throughput=ThroughputOptions(prompt_tokens=24, new_tokens=8, kv_bytes=64)), material)
    with pytest.raises(
        ValueError, match="the throughput budget of 64 bytes of K,V holds no row under full, which takes"
    ):
        task.run(runtime, contender("full"), {"round": 0})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"perplexity": PerplexityOptions(tokens=4000)}, "text.file=sea.txt has .* tokens but perplexity needs 4,000"),
        ({"copy": CopyOptions(filler=9000)}, "text.file=sea.txt has .* tokens but copy needs 9,128"),
        ({"copy": CopyOptions(passage=200, filler=200)}, "takes 600 positions, but the model has 512"),
        (
            {"passkey": RetrievalOptions(lengths=[510])},
            "passkey.lengths=510 takes 518 positions, but the model has 512",
        ),
        (
            {"passkey": RetrievalOptions(lengths=[60])},
            "passkey.lengths=60 has no room for fact, question and other text",
        ),
        ({"throughput": ThroughputOptions()}, "throughput.prompt_tokens .* takes 768 positions, but the model has 512"),
    ],
)
def test_what_does_not_fit_is_told_before_the_model_is_loaded(
    options: dict[str, Any], says: str, material: Material
) -> None:
    [name] = options
    with pytest.raises(ValueError, match=says) as caught:
        TASKS[name](EvaluateRun(**options), material)
    assert "\n" not in str(caught.value)


def test_a_haystack_that_ends_too_early_is_told(tokenizer: Any) -> None:
    short = Material(
        tokenizer=tokenizer, vocab_size=330, max_positions=512, text=Text(name="text.file=a.txt", content="A b. C d.")
    )
    with pytest.raises(
        ValueError, match="text.file=a.txt is too short for needle.lengths=300; give a longer text.file"
    ):
        Needle(EvaluateRun(needle=RetrievalOptions(lengths=[300])), short)


def test_only_a_bounded_cache_reads_more_than_the_model_has_positions(
    runtime: Runtime, tokenizer: Any, text: str, folder: Path
) -> None:
    long = Material(
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        max_positions=512,
        text=Text(name="text.file=a.txt", content=text * 2),
    )
    task: Task = Perplexity(EvaluateRun(perplexity=PerplexityOptions(tokens=900, chunk=64)), long)
    bounded = contender({"name": "streaming_llm", "budget": 64, "positions": "reencoded"})
    for entry in ("full", "streaming_llm", {"name": "streaming_llm", "budget": 64}):
        with pytest.raises(ValueError, match=f"takes {900 + PROBE_TOKENS} positions, but the model has 512; use fewer"):
            task.check(contender(entry), runtime.model.num_layers)
    task.check(bounded, runtime.model.num_layers)
    outcome: Outcome = task.run(runtime, bounded, {"sample": 0})
    assert math.isfinite(outcome.score) and outcome.kv.num_tokens == 900
    assert outcome.kv.kept_tokens == [64] * runtime.model.num_layers


def test_special_tokens_that_begin_a_text_are_found(tokenizer: Any, text: str) -> None:
    class WithStart:
        def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, list[int]]:
            ids = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
            return {"input_ids": [0, *ids, 1] if add_special_tokens else ids}

    kinds = [
        Material(tokenizer=kind, vocab_size=330, max_positions=None, text=None) for kind in (WithStart(), tokenizer)
    ]
    assert [kind.prefix for kind in kinds] == [[0], []]
