"""Prompts in chunks, and texts of any length through a cache of fixed size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from launch.infer import INFER, main
from launch.inputs.options import ineffective_settings
from policies.base import Policy
from policies.chunkkv import ChunkKV
from policies.expected_attention import ExpectedAttention
from policies.h2o import H2O
from policies.k_centers import KCenters
from policies.keydiff import KeyDiff
from policies.keyformer import Keyformer
from policies.lagkv import LagKV
from policies.layer_view import LayerView, Phase
from policies.pyramidinfer import PyramidInfer
from policies.pyramidkv import PyramidKV
from policies.r_kv import RKV
from policies.scissorhands import Scissorhands
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.window import Window
from runahead import Conversation, Engine, GenerationOptions, Model, PrefillOptions, Ranks
from runahead.config import Positions, PrefillName
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.prefill.prompt_check import PromptLimits
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.exit_status import exit_status
from tests.families import build, oracle_logits, prompt, throughout
from tests.policies.running import Run
from tests.policies.written_out import WrittenOut
from tests.ranks.tasks import tiny_model

TOLERANCE = 1e-9  # float64
LIMIT = 64
"""Positions of the models whose limit the streams exceed."""
CHUNK, LENGTH = 16, 600

BOUNDED: list[Policy] = [
    Window(budget=24),
    StreamingLLM(budget=24, sinks=3),
    H2O(budget=24),
    SnapKV(budget=24, window=4, kernel=3),
    PyramidKV(budget=16, window=4, kernel=3, beta=2.0),
    KeyDiff(budget=24),
    TOVA(budget=24),
    ExpectedAttention(budget=24, evict_every=16, future_tokens=16),
    LagKV(budget=24, sinks=3, lag=4, evict_every=16),
    ChunkKV(budget=24, window=4, chunk=5),
    RKV(budget=24, window=4, kernel=3, evict_every=16),
    Scissorhands(budget=24, recent=3, window=6),
    Keyformer(budget=24, tau_tokens=8),
    KCenters(budget=24, sinks=3, evict_every=16),
    PyramidInfer(budget=20, min_tokens=4, sinks=2),
]
every_bounded = pytest.mark.parametrize("policy", BOUNDED, ids=lambda policy: type(policy).__name__)


def short_model(num_layers: int) -> Model:
    with throughout(torch.float64):
        return Model(build("llama", num_hidden_layers=num_layers, max_position_embeddings=LIMIT))


@pytest.fixture(scope="module")
def model() -> Model:
    return short_model(3)


def generate(
    ranks: Ranks,
    model: Model,
    prompts: list[list[int]],
    policies: RankPolicies | None = None,
    *,
    chunk_tokens: int | None = CHUNK,
    num_new: int = 4,
) -> GenerationBatch:
    engine = Engine(model, ranks, prefill=PrefillOptions(chunk_tokens=chunk_tokens), policies=policies)
    with throughout(torch.float64):
        return engine.generate(prompts, GenerationOptions(max_new_tokens=num_new, ignore_eos=True))


def top5(batch: GenerationBatch, row: int = 0) -> dict[int, float]:
    return dict(batch.generations[row].first_token_logits_top5)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "phi3_longrope", "llama_dynamic_ntk", "bart", "falcon_alibi", "gpt_oss"]
)
@pytest.mark.parametrize("chunk_tokens", [1, 16, 60, 1000])
@pytest.mark.sampled(3)
def test_chunks_of_a_full_cache_do_not_matter(ranks: Ranks, family: str, chunk_tokens: int) -> None:
    ids = prompt(60)
    batch = generate(ranks, tiny_model(family), [ids], chunk_tokens=chunk_tokens)
    for token, value in top5(batch).items():
        assert value == pytest.approx(oracle_logits(family, tuple(ids))[token].item(), abs=TOLERANCE)
    whole = generate(ranks, tiny_model(family), [ids], chunk_tokens=None)
    assert batch.generations[0].new_token_ids == whole.generations[0].new_token_ids
    assert batch.ranks[0].kv_kept_bytes == whole.ranks[0].kv_kept_bytes


@pytest.mark.parametrize(
    "policy",
    [StreamingLLM(budget=0.3), H2O(budget=0.3), SnapKV(budget=0.3, window=4, kernel=3)],
    ids=lambda policy: type(policy).__name__,
)
def test_a_share_is_of_the_prompt_however_it_is_cut(ranks: Ranks, policy: Policy) -> None:
    """Such a policy sees all of the prompt: so chunks change memory, and nothing else."""
    prompts = [prompt(60), prompt(37, seed=1), prompt(5, seed=2)]
    policies = RankPolicies.everywhere([policy])
    chunks = generate(ranks, tiny_model("llama"), prompts, policies, chunk_tokens=17, num_new=24)
    whole = generate(ranks, tiny_model("llama"), prompts, policies, chunk_tokens=None, num_new=24)
    for row in range(3):
        assert top5(chunks, row) == pytest.approx(top5(whole, row), abs=TOLERANCE)
        assert chunks.generations[row].new_token_ids == whole.generations[row].new_token_ids
    assert chunks.ranks[0].kept_tokens == whole.ranks[0].kept_tokens == [18, 18, 18]
    assert chunks.ranks[0].kv_kept_bytes == whole.ranks[0].kv_kept_bytes


def test_activations_are_those_of_a_chunk(ranks: Ranks) -> None:
    widths: list[int] = []
    model = tiny_model("llama")
    hook = model.module.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    try:
        generate(ranks, model, [prompt(60)], chunk_tokens=17, num_new=1)
    finally:
        hook.remove()
    assert widths == [17, 17, 17, 9]


@pytest.mark.parametrize("chunk", [1, 7, CHUNK])
def test_a_layer_sees_the_sinks_the_window_and_the_chunk_as_one_text(chunk: int) -> None:
    """With one layer, K,V depend on their own token alone: so it is transformers on those tokens and no others."""
    model, module = short_model(1), build("llama", num_hidden_layers=1)
    ids, budget, sinks = prompt(LENGTH), 24, 3
    run = Run(model, [StreamingLLM(budget=budget, sinks=sinks)], [ids, prompt(LENGTH - 5, seed=1)], reencoded=True)
    for end in range(chunk, 15 * chunk + 1, chunk):
        logits_V = run.chunk(chunk)[0]
        before = ids[: end - chunk]
        if len(before) > budget:
            before = before[:sinks] + before[-(budget - sinks) :]
        with throughout(torch.float64), torch.inference_mode():
            expected_V = module(torch.tensor([before + ids[end - chunk : end]])).logits[0, -1]
        torch.testing.assert_close(logits_V, expected_V, atol=TOLERANCE, rtol=0)


@every_bounded
@pytest.mark.sampled(6)
def test_a_stream_longer_than_the_model_is_what_is_written_out(
    model: Model, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers, each with what it kept and that numbered from 0; and memory does not grow."""
    ids = prompt(LENGTH)
    run, reference = Run(model, [policy], [ids], reencoded=True), WrittenOut(build("llama"))
    left: list[Tensor] = []
    narrow = policy.narrow

    def noting(view: LayerView) -> Tensor | None:
        selected_Bc = narrow(view)
        left.append(left[-1] if selected_Bc is None else left[-1][selected_Bc[0]])
        return selected_Bc

    monkeypatch.setattr(policy, "narrow", noting)
    num_bytes = []
    for start in range(0, LENGTH, CHUNK):
        chunk = ids[start : start + CHUNK]
        left[:] = [torch.arange(start, start + len(chunk))]
        logits_V = run.chunk(len(chunk))[0]
        torch.testing.assert_close(
            logits_V, reference.feed(chunk, left if policy.narrows else None), atol=TOLERANCE, rtol=0
        )
        for layer, kept in enumerate(run.kept.layers):
            reference.keep(layer, kept.positions_BKn()[0].long())
        num_bytes.append(run.kept.num_bytes)
    bound = policy.most_slots(3, Phase.prefill)
    assert bound is not None and max(run.kept.slots_by_layer) == bound
    assert len(set(num_bytes[5:])) == 1  # after warm-up


@every_bounded
@pytest.mark.sampled(6)
def test_a_prompt_longer_than_the_model_is_taken_chunk_by_chunk(ranks: Ranks, model: Model, policy: Policy) -> None:
    prompts = [prompt(LENGTH), prompt(LENGTH - 100, seed=1), prompt(7, seed=2)]
    batch = generate(ranks, model, prompts, RankPolicies.everywhere([policy], Positions.reencoded), num_new=9)
    run = Run(model, [policy], prompts, reencoded=True)
    for start in range(0, LENGTH, CHUNK):
        logits_BV = run.chunk(min(CHUNK, LENGTH - start))
    for row in range(3):
        assert all(
            value == pytest.approx(logits_BV[row, t].item(), abs=TOLERANCE) for t, value in top5(batch, row).items()
        )
        assert len(batch.generations[row].new_token_ids) == 9
    assert batch.ranks[0].kept_tokens == run.kept.slots_by_layer
    per_slot = sum(shape.bytes_per_token(3) for shape in model.kv_shapes)
    assert batch.ranks[0].kv_kept_bytes < 1.3 * per_slot * (24 + CHUNK + 9)  # K,V, positions, what is carried


def test_without_chunk_tokens_the_chunks_fit_the_model(ranks: Ranks, model: Model) -> None:
    policies = RankPolicies.everywhere([StreamingLLM(budget=24)], Positions.reencoded)
    ours = generate(ranks, model, [prompt(LENGTH)], policies, chunk_tokens=None)
    theirs = generate(ranks, model, [prompt(LENGTH)], policies, chunk_tokens=LIMIT - 24)
    assert ours.generations == theirs.generations


def test_answers_may_be_longer_than_the_model_too(ranks: Ranks) -> None:
    """One layer, cut back behind every token: each token comes of the sinks, the window and the one before it."""
    module = build("llama", num_hidden_layers=1)
    policies = RankPolicies.everywhere([StreamingLLM(budget=24, sinks=3, evict_every=1)], Positions.reencoded)
    batch = generate(ranks, short_model(1), [prompt(40)], policies, chunk_tokens=None, num_new=2 * LIMIT)
    text = prompt(40)
    for token in batch.generations[0].new_token_ids:
        if len(text) > 40:
            seen = text[:3] + text[-22:]
            with throughout(torch.float64), torch.inference_mode():
                assert int(module(torch.tensor([seen])).logits[0, -1].argmax()) == token
        text.append(token)
    assert len(text) == 40 + 2 * LIMIT


def test_a_conversation_may_be_longer_than_the_model(model: Model) -> None:
    policies = RankPolicies.everywhere([StreamingLLM(budget=24)], Positions.reencoded)
    ids, num_bytes = prompt(LENGTH), []
    with throughout(torch.float64):
        conversation = Conversation(model, policies)
        run = Run(model, [StreamingLLM(budget=24)], [ids], reencoded=True)
        for start in range(0, LENGTH, CHUNK):
            logits_1V = conversation.feed(torch.tensor([ids[start : start + CHUNK]]))
            torch.testing.assert_close(logits_1V, run.chunk(min(CHUNK, LENGTH - start)), atol=TOLERANCE, rtol=0)
            num_bytes.append(conversation.kv_bytes)
        assert len(set(num_bytes[5:])) == 1
        with pytest.raises(ValueError, match=f"exceeds the {LIMIT} positions"):
            conversation.feed(torch.tensor([ids[: LIMIT - 23]]))


def test_what_stays_is_never_touched(model: Model) -> None:
    """Keys are stored as they are before RoPE: the sinks' are the same numbers at the end of a stream, in bfloat16."""
    half = Model(build("llama", dtype=torch.bfloat16, max_position_embeddings=LIMIT))
    run = Run(half, [StreamingLLM(budget=24, sinks=3)], [prompt(LENGTH)], reencoded=True)
    sinks = []
    for _ in range(0, LENGTH, CHUNK):
        logits_1V = run.chunk(CHUNK)
        sinks.append([layer.slab().tokens(0, 3).clone() for layer in run.kept.layers])
    assert logits_1V.isfinite().all()
    for first, last in zip(sinks[0], sinks[-1], strict=True):
        assert torch.equal(first, last)


@pytest.mark.parametrize("schedule", ["power", "uniform", "more", "cosine"])
def test_fixed_lengths_have_the_budget_as_their_mean(schedule: str) -> None:
    policy = PyramidInfer(budget=1000, schedule=schedule)  # type: ignore[arg-type]
    lengths = policy.fixed_lengths(32)
    assert lengths is not None and lengths == sorted(lengths, reverse=True)
    # Lengths are rounded, and in the cosine schedule rounded down from layer to layer.
    assert sum(lengths) / 32 == pytest.approx(1000, rel=0.01)
    assert policy.most_slots(32, Phase.prefill) == lengths[0]


def test_nothing_is_dropped_below_the_fixed_lengths(model: Model) -> None:
    ids = prompt(30)
    ours, full = Run(model, [PyramidInfer(budget=100)], [ids]), Run(model, [], [ids])
    for chunk in (11, 19):
        assert torch.equal(ours.chunk(chunk), full.chunk(chunk))


BOUNDED_AND_REENCODED = ["policy=streaming_llm", "policy.budget=24", "policy.positions=reencoded"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build("llama", dtype=torch.float32, max_position_embeddings=LIMIT).config.save_pretrained(path)
    return str(path)


@pytest.fixture
def program() -> Callable[..., int]:
    """launch/infer.py in this process: arguments to exit status."""
    return lambda *arguments: exit_status(main, arguments)


def command(folder: str, *more: str) -> list[str]:
    return ["model=random", f"model.config={folder}", "ranks.threads=1", "generation.max_new_tokens=4", *more]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "use a shorter prompt, or policy=streaming_llm policy.budget=32 policy.positions=reencoded"),
        (["policy=snapkv", "policy.budget=0.2"], "or a policy that keeps a fixed number of tokens"),
        (["policy=pyramidinfer", "policy.positions=reencoded"], "or a policy that keeps a fixed number of tokens"),
        (["policy=streaming_llm", "policy.budget=24"], "or policy.positions=reencoded"),
        ([*BOUNDED_AND_REENCODED, "policy.budget=60", "prefill.chunk_tokens=16"], "a smaller policy.budget or prefill"),
        (
            ["policy=snapkv", "policy.budget=40", "policy.positions=reencoded", "generation.max_new_tokens=30"],
            "or a policy that also forgets while it answers",
        ),
        (["prefill.chunk_tokens=0"], "prefill.chunk_tokens=0 must be at least 1"),
        (["policy=window", "policy.positions=rotated"], "policy.positions=rotated is not one of original, reencoded"),
        (["policy=pyramidinfer", "policy.budget=0.5"], "shares of the prompt are policy.mean_keep"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_what_helps(
    program: Callable[..., int], folder: str, overrides: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert program(*command(folder, f"prompt.random_tokens={LENGTH}", *overrides)) in (1, 2)
    [line] = capfd.readouterr().err.splitlines()
    assert says in line


def test_the_program_takes_a_prompt_longer_than_the_model(
    program: Callable[..., int], folder: str, tmp_path: Path
) -> None:
    report = tmp_path / "run.json"
    arguments = [f"prompt.random_tokens={LENGTH}", f"report={report}", f"timeline={tmp_path / 'trace.json'}"]
    assert program(*command(folder, *BOUNDED_AND_REENCODED, "prefill.chunk_tokens=16", *arguments)) == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["prompt_tokens"] == LENGTH and len(found["new_token_ids"]) == 4
    assert found["ranks"][0]["kept_tokens"] == [24, 24, 24]


CLAMPED = ["policy=infllm", "policy.recent=16", "policy.sinks=2", "policy.block=4", "policy.observed=8"]


@pytest.mark.parametrize(("family", "overrides"), [("bart", []), ("llama", CLAMPED)], ids=["own positions", "clamped"])
def test_prompts_of_lengths_that_cannot_run_at_once_are_in_batches_of_their_own(
    program: Callable[..., int], tmp_path: Path, family: str, overrides: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Prompts of one length still run at once; the answers are those of prompts that come one by one."""
    limit = {"max_position_embeddings": LIMIT} if family == "llama" else {}
    build(family, dtype=torch.float32, **limit).config.save_pretrained(tmp_path)
    prompts, found = [prompt(num, seed=num) for num in (70, 70, 80, 70)], []
    (tmp_path / "ids.json").write_text(json.dumps(prompts))
    for batch in (1, 4):
        given = [f"prompt.ids_file={tmp_path / 'ids.json'}", f"prompt.batch={batch}", *overrides]
        assert program(*command(str(tmp_path), "prefill=single", *given)) == 0
        lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        found.append([(line["index"], line["new_token_ids"]) for line in lines])
    assert found[0] == found[1] and len(found[0]) == 4
    limits = PromptLimits(uneven_limit=0)
    assert limits.together([70, 70, 80, 70], 4) == [range(2), range(2, 3), range(3, 4)]
    assert PromptLimits().together([70, 70, 80, 70], 4) == [range(4)]


def test_settings_without_effect_are_told() -> None:
    said = ineffective_settings(INFER.compose(["policy.positions=reencoded"]))
    assert said == ["policy.positions has no effect with policy=full"]
    said = ineffective_settings(INFER.compose(["prefill=tsp", "prefill.chunk_tokens=16"]))
    assert said == ["prefill.chunk_tokens has no effect with prefill=tsp"]


def test_chunks_on_several_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("prefill.chunk_tokens=16 is for a prompt that one rank computes")):
        check(Setup(prefill=PrefillOptions(chunk_tokens=16), num_chunks=2))
    check(Setup(prefill=PrefillOptions(chunk_tokens=16, name=PrefillName.single), num_chunks=2))
    policies = RankPolicies.everywhere([StreamingLLM(budget=24)], Positions.reencoded)
    told = PromptLimits(max_positions=LIMIT, num_layers=3, policies=policies, num_ranks=2).remedy(100, 1)
    assert told is not None and "prefill=single" in told
