"""Questions under both protocols: what policies see, one prefill for all of them, and the answer that is scored."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evaluation.contenders import Contender, contenders
from benchmarks.evaluation.evaluate import _warm_up
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.options import EvaluateRun, KeyValueOptions, Question, RetrievalOptions, RulerOptions
from benchmarks.evaluation.tasks import answering
from benchmarks.evaluation.tasks.answering import Item, prefilled, recall
from benchmarks.evaluation.tasks.base import Outcome, Runtime
from benchmarks.evaluation.tasks.key_value import KeyValue, half_way
from benchmarks.evaluation.tasks.retrieval import Passkey
from benchmarks.evaluation.tasks.ruler.task import Ruler
from policies.duo_table import DuoTable
from policies.h2o import H2O
from policies.layer_view import LayerView
from policies.snapkv import SnapKV
from runahead import Conversation, Engine, Model, PrefillOptions, Ranks, RanksOptions
from runahead.config import Attention, Device, GenerationOptions
from tests.families import build

SNAPKV = {"name": "snapkv", "window": 4, "kernel": 3}
EVERY_KIND = [
    "full",
    SNAPKV,
    {"name": "adakv", "scorer": SNAPKV},
    {"name": "h2o", "evict_every": 1},
    {"name": "pyramidinfer", "min_tokens": 8},
    {"name": "quest", "page": 4, "fetch": 0.3},
    {"name": "window", "positions": "reencoded"},
]


@pytest.fixture(scope="module")
def runtime(model: Model) -> Runtime:
    return Runtime(model=model, ranks=Ranks.start(RanksOptions(device=Device.cpu, threads=1)))


def passkey(material: Material, question: Question = Question.separate, **options: Any) -> Passkey:
    given = {"lengths": [200], "depths": [0.5], "question": question, "new_tokens": 4} | options
    return Passkey(EvaluateRun(passkey=RetrievalOptions(**given)), material)


class Watched:
    """Positions of the queries that policies were shown while the model ran, by layer and phase."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: type[SnapKV | H2O]) -> None:
        self.kept: list[tuple[int, int]] = []
        keep = kind.keep

        def watched(policy: Any, view: LayerView) -> Any:
            if view.layer == 0:
                self.kept.append((int(view.new_positions_BC[0, 0]), int(view.new_positions_BC[0, -1])))
            return keep(policy, view)

        patch.setattr(kind, "keep", watched)


def test_a_question_that_is_not_seen_has_no_query_among_those_that_choose(
    runtime: Runtime, material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fed with cut_back=True, or together with the context, its queries would vote for what it asks for."""
    watched, contender = Watched(monkeypatch, SnapKV), contenders([SNAPKV], [0.5])
    task = passkey(material)
    item = task.item(task.cases[0])
    unseen = task.run(runtime, contender[0], task.cases[0])
    assert watched.kept == [(0, len(item.context) - 1), *watched.kept[1:]]
    assert all(first == last >= len(item.context) + len(item.question) for first, last in watched.kept[1:])  # decoding
    watched.kept.clear()
    seen = passkey(material, Question.with_context).run(runtime, contender[0], task.cases[0])
    assert watched.kept[0] == (0, len(item.context) + len(item.question) - 1)
    assert unseen.kv.num_tokens == len(item.context) and seen.kv.num_tokens == unseen.kv.num_tokens + len(item.question)


def test_what_is_kept_does_not_depend_on_an_unseen_question(runtime: Runtime, material: Material) -> None:
    kept = []
    for asked in (" What is the pass key? The pass key is", " Hello"):
        task = passkey(material)
        item = replace(task.item(task.cases[0]), question=material.ids(asked))
        [contender] = contenders([SNAPKV], [0.3])
        conversation = Conversation(runtime.model, contender.policies)
        conversation.feed(torch.tensor([item.context]))
        conversation.feed(torch.tensor([item.question]), cut_back=False)
        assert conversation.cache is not None
        num_kept = round(0.3 * len(item.context))
        kept.append([layer.positions_BKn()[..., :num_kept].tolist() for layer in conversation.cache.layers])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("question", Question)
def test_one_prefill_for_all_policies_gives_each_the_answer_that_it_gives_alone(
    question: Question, runtime: Runtime, material: Material
) -> None:
    task, every = passkey(material, question), contenders(EVERY_KIND, [0.4])
    together = list(task.run_all(runtime, every, task.cases[0]))
    assert [contender for contender, _ in together] == every
    for contender, shared in together:
        alone = task.run(runtime, contender, task.cases[0])
        for name in ("score", "seen_share", "kv"):
            assert getattr(alone, name) == getattr(shared, name), (contender.name, name)
        for name in ("answer", "nll", "key"):  # bit for bit
            assert alone.details[name] == shared.details[name], (contender.name, name)
    nlls = {outcome.details["nll"] for _, outcome in together}
    assert len(nlls) == len(every)  # none is a copy of another's


def test_only_policies_that_may_share_a_prefill_do(
    runtime: Runtime, material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_forwards, forward = 0, Model.forward

    def counted(model: Model, ids_BC: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += ids_BC.shape[1] > 100
        return forward(model, ids_BC, *args, **options)

    monkeypatch.setattr(Model, "forward", counted)
    task = passkey(material)
    for _ in task.run_all(runtime, contenders(EVERY_KIND, [0.4]), task.cases[0]):
        pass
    assert num_forwards == 3  # pyramidinfer's, that of re-encoded positions, and that of all others


class Spelled(Material):
    """Material in which "said" stands for tokens that a model says, "other" for these with another one at the end."""

    said: list[int]

    def ids(self, text: str) -> list[int]:
        other = {"said": self.said, "other": [*self.said[:-1], self.said[-1] + 1], "wrong": [self.said[0] + 1]}
        return other[text] if text in other else super().ids(text)


@pytest.mark.parametrize("entry", EVERY_KIND, ids=str)
def test_the_answer_is_that_of_greedy_decoding_whether_it_is_generated_or_compared(
    entry: Any, runtime: Runtime, material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated: list[list[int]] = []
    generate = Conversation.generate

    def noted(conversation: Conversation, options: GenerationOptions) -> Any:
        decoded = generate(conversation, options)
        generated.append(decoded.rows[0].new_ids)
        return decoded

    monkeypatch.setattr(Conversation, "generate", noted)
    monkeypatch.setattr(Passkey, "score", lambda task, answer, item: float(item.answers[0] in answer))
    task, [contender] = passkey(material, new_tokens=6), contenders([entry], [0.4])
    item = task.item(task.cases[0])
    answer = task.run(runtime, contender, task.cases[0]).details["answer"]
    [said] = generated
    spelled = Spelled(**{field.name: getattr(material, field.name) for field in fields(material)})
    object.__setattr__(spelled, "said", said)  # frozen
    task.material = spelled
    for reference, num_generated in (("said", 0), ("other", 1), ("wrong", 1)):
        generated.clear()
        asked = replace(item, reference=reference, answers=[answer.rstrip("\ufffd")])
        [(_, outcome)] = task.outcomes(runtime, [contender], asked)
        assert outcome.score == 1.0 and outcome.details["answer"].startswith(asked.answers[0]), reference
        assert len(generated) == num_generated and generated in ([], [said]), reference
        assert outcome.details["nll"] > 0


def test_without_new_tokens_the_answer_ends_at_its_first_difference(
    runtime: Runtime, material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RulerOptions(tasks=["niah_single_1"], lengths=[480], samples=1, new_tokens=0)
    task = Ruler(EvaluateRun(ruler=options), material)
    monkeypatch.setattr(Conversation, "generate", lambda *_: pytest.fail("nothing is to be generated"))
    [full] = contenders(["full"], [])
    outcome = task.run(runtime, full, task.cases[0])
    assert outcome.score == 0.0 and not re.search(r"\d{2}", outcome.details["answer"])


def test_an_answer_that_is_a_set_is_generated_and_has_no_loss(
    runtime: Runtime, material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's part is played: the strings in another order than the text's are as right."""
    options = RulerOptions(tasks=["niah_multivalue"], lengths=[480], samples=1, new_tokens=0)
    task = Ruler(EvaluateRun(ruler=options), replace(material, max_positions=None))
    item = task.item(task.cases[0])
    generate, asked = Conversation.generate, []

    def played(self: Conversation, generation: GenerationOptions) -> Any:
        asked.append(generation.max_new_tokens)
        decoded = generate(self, GenerationOptions(max_new_tokens=2))
        decoded.rows[0].new_ids = material.ids(" " + ", ".join(reversed(item.answers[1:])))
        return decoded

    monkeypatch.setattr(Conversation, "generate", played)
    for _, outcome in task.run_all(runtime, contenders(["full", SNAPKV, "quest"], [0.5]), task.cases[0]):
        assert outcome.score == 0.75 and outcome.details["nll"] is None
    assert asked == [128] * 3


def test_tables_say_what_attention_saw(runtime: Runtime, material: Material) -> None:
    """A policy that retrieves nothing saw everything, however few bytes it keeps on the device."""
    task = passkey(material)
    quest_of = {"name": "quest", "page": 4, "fetch": 0.25, "first_layer": 0}
    entries = ["full", SNAPKV, quest_of, quest_of | {"min_tokens": 4096}]
    full, snapkv, quest, idle = (
        outcome for _, outcome in task.run_all(runtime, contenders(entries, [0.5]), task.cases[0])
    )
    assert full.seen_share == idle.seen_share == 1.0
    assert snapkv.seen_share == pytest.approx(0.5, abs=0.01)
    assert 0.2 < quest.seen_share < 0.45
    for outcome in (quest, idle):
        assert outcome.kv.kv_bytes < 0.4 * outcome.kv.full_kv_bytes <= outcome.kv.host_bytes
    assert full.kv.host_bytes == snapkv.kv.host_bytes == 0
    assert idle.details["nll"] == pytest.approx(full.details["nll"], abs=1e-4) != quest.details["nll"]


def test_recall_counts_strings_in_upper_or_lower_case() -> None:
    assert recall("The words are Ice, SEA and captain", ["ice", "sea", "ship", "Captain"]) == 0.75


def key_value(material: Material, **options: Any) -> KeyValue:
    return KeyValue(EvaluateRun(key_value=KeyValueOptions(**options)), replace(material, max_positions=None))


def test_a_value_is_asked_by_its_key(material: Material) -> None:
    task = key_value(material, pairs=[4, 9], samples=3)
    keys = set()
    for case in task.cases:
        item = task.item(case)
        context, question = (material.tokenizer.decode(part) for part in (item.context, item.question))
        pairs = dict(pair.split(": ") for pair in context[context.index("{") + 1 : -1].split(",\n"))
        key = question.split('"')[1]
        keys.add(key)
        assert len(pairs) == case["pairs"] and pairs[f'"{key}"'] == f'"{item.answers[0]}"'
        assert item.reference == item.answers[0] and item.new_tokens == 0
        assert task.item(case) == item
        assert task.score(f' {item.answers[0]}"', item) == 1.0 and task.score(item.answers[0][:-1], item) == 0.0
    assert len(keys) == len(task.cases)


@pytest.mark.parametrize(
    ("half", "longest", "expected"),
    [(1.5, 500, 2), (10, 500, range(9, 12)), (100, 500, range(90, 112)), (900, 40, range(36, 41))],
)
def test_the_number_of_keys_is_searched_at_which_half_are_found(half: float, longest: int, expected: Any) -> None:
    asked = []

    def found_share(pairs: int) -> float | None:
        asked.append(pairs)
        return None if pairs > longest else 1 / (1 + (pairs / half) ** 3)

    found = half_way(found_share)
    assert found == expected if isinstance(expected, int) else found in expected
    assert len(asked) == len(set(asked)) <= 12


def test_a_search_that_was_interrupted_is_not_made_again(
    runtime: Runtime, material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = key_value(material, samples=1, search_samples=1, most_tokens=700)
    searched: list[Item] = []
    outcomes = KeyValue.outcomes

    def noted(self: KeyValue, runtime: Runtime, every: list[Contender], item: Item) -> Any:
        searched.append(item)
        return outcomes(self, runtime, every, item)

    monkeypatch.setattr(KeyValue, "outcomes", noted)
    task.prepare(runtime, [])
    assert searched and max(len(item.context) for item in searched) < 700
    [full] = contenders(["full"], [])
    outcome: Outcome = task.run(runtime, full, task.cases[0])
    assert outcome.details["pairs"] == 2  # the random model finds none
    searched.clear()
    again = key_value(material, samples=1, search_samples=1, most_tokens=700)
    again.prepare(runtime, [{"details": {"pairs": 5}}])
    assert not searched and again.item(again.cases[0]).details["pairs"] == 5


def duo(folder: Path, model: Model) -> dict[str, Any]:
    """Entry of policies= with a table of streaming heads for a model."""
    gates = [torch.tensor([0.9, 0.1]), torch.tensor([0.2, 0.8]), torch.tensor([0.3, 0.7])]
    table = DuoTable(gates=gates, sinks=2, recent=9, fingerprint=model.fingerprint)
    for name, content in table.files().items():
        (folder / name).write_text(content, encoding="utf-8")
    return {"name": "duo_attention", "heads": str(folder), "evict_every": 1}


def test_a_prompt_with_streaming_heads_is_answered_as_an_engine_does(
    runtime: Runtime, material: Material, tmp_path: Path
) -> None:
    """Which gives other tokens than a prompt whose heads are cut back after all have seen all of it."""
    model, item = runtime.model, passkey(material).item(passkey(material).cases[0])
    entry = duo(tmp_path, model)
    answers = []
    for attention in ("causal", "streaming_heads"):
        [contender] = contenders([entry | {"attention": attention}], [])
        [(_, conversation, _)] = prefilled(runtime, [contender], item.context, len(item.context) + 8)
        [row] = conversation.generate(GenerationOptions(max_new_tokens=8, ignore_eos=True)).rows
        prefill = PrefillOptions(attention=Attention[attention])
        engine = Engine(model, runtime.ranks, prefill=prefill, policies=contender.policies)
        [wanted] = engine.generate([item.context], GenerationOptions(max_new_tokens=8, ignore_eos=True)).generations
        assert row.new_ids == wanted.new_token_ids
        answers.append(row.new_ids)
    assert answers[0] != answers[1]


def test_the_warm_up_prefills_as_each_entry_does(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed, feed = list[str](), answering.feed_streaming

    def noted(conversation: Conversation, prefill: PrefillOptions, *args: Any) -> float:
        streamed.append(prefill.attention.name)
        return feed(conversation, prefill, *args)

    monkeypatch.setattr(answering, "feed_streaming", noted)
    entry = duo(tmp_path, runtime.model)
    _warm_up(runtime, contenders(["full", entry | {"attention": "streaming_heads"}], []))
    assert streamed == ["streaming_heads"]


def test_streaming_heads_are_refused_where_a_question_changes_the_angles(tmp_path: Path) -> None:
    model = Model(build("phi3_longrope", dtype=torch.float32), name="long")
    for attention in ("causal", "streaming_heads"):
        [contender] = contenders([duo(tmp_path, model) | {"attention": attention}], [])
        if attention == "causal":
            contender.check(model)
            continue
        with pytest.raises(ValueError, match="^duo_attention.*: model long rotates by angles that depend on"):
            contender.check(model)
