"""python -m policies.duo_gates: attention under gates, gates by training or by KVzip, the folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from launch.duo_gates import GatesMethod, GatesRun, by_kvzip, by_optimising, passkey_text
from policies.duo_attention import DuoAttention
from policies.duo_table import DuoTable
from policies.streaming_llm import StreamingLLM
from runahead import Model
from runahead.attention.gated import GatedAttention
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.launch.learning import ended
from tests.policies.running import Run
from tests.policies.test_kvzip import CHUNK, SINKS, scores_by_hand
from tests.policies.test_relations import FILLER, PASSAGE, STARTS, conversation, model, nll, text_ids
from tests.ranks.tasks import tiny_model


def logits_of(tiny: Model, attention: GatedAttention, ids: list[int]) -> Tensor:
    """Logits (C, V) of all tokens."""
    with throughout(torch.float64):
        return tiny.forward(torch.tensor([ids]), attention, start=0, pads=[0], all_logits=True)[0]


def gates_of(tiny: Model, gate: float) -> list[Tensor]:
    return [torch.full((shape.num_kv_heads,), gate) for shape in tiny.kv_shapes]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode", "qwen3"])
def test_open_gates_are_full_attention_and_closed_ones_are_streaming(family: str) -> None:
    """Token by token: a closed gate sees what StreamingLLM has when it cuts back after every token."""
    tiny, ids, sinks, recent = tiny_model(family), prompt(20), 2, 5
    full = Run(tiny, [], [ids])
    expected = [full.chunk(1, evicts=False)[0] for _ in ids]
    open_TV = logits_of(tiny, GatedAttention(gates_of(tiny, 1.0), sinks=sinks, recent=recent), ids)
    torch.testing.assert_close(open_TV, torch.stack(expected), atol=1e-9, rtol=0)
    assert torch.equal(open_TV, logits_of(tiny, GatedAttention(None), ids))
    streaming = Run(tiny, [StreamingLLM(budget=sinks + recent - 1, sinks=sinks, evict_every=1)], [ids])
    expected = [streaming.decode(token)[0] for token in ids]
    closed_TV = logits_of(tiny, GatedAttention(gates_of(tiny, 0.0), sinks=sinks, recent=recent), ids)
    torch.testing.assert_close(closed_TV, torch.stack(expected), atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_gates_are_not_trained_through_sinks_or_soft_caps(family: str) -> None:
    with pytest.raises(ValueError, match="use by=kvzip"):
        logits_of(tiny_model(family), GatedAttention(None), prompt(9))


def test_last_hidden_states_are_the_models_own_and_gradients_reach_every_gate() -> None:
    tiny, ids_1C = tiny_model("llama"), torch.tensor([prompt(20)])
    with throughout(torch.float64):
        gates = [gates_K.requires_grad_() for gates_K in gates_of(tiny, 0.5)]
        hidden_CD = tiny.hidden_states(ids_1C, GatedAttention(gates, sinks=2, recent=5))[0]
        logits_V = tiny.module.get_output_embeddings()(hidden_CD)[-1]
        hidden_CD[-1].square().sum().backward()
    same_V = logits_of(tiny, GatedAttention(gates_of(tiny, 0.5), sinks=2, recent=5), prompt(20))[-1]
    torch.testing.assert_close(logits_V.detach(), same_V, atol=1e-9, rtol=0)
    for gates_K in gates[:-1]:
        assert gates_K.grad is not None and (gates_K.grad != 0).all()


def test_gates_of_kvzip_are_its_largest_scores() -> None:
    """All tokens but the first ones count, over both texts."""
    tiny, ids = tiny_model("llama"), prompt(CHUNK)
    run = GatesRun(by=GatesMethod.kvzip, tokens=CHUNK, sinks=SINKS, recent=4, samples=2, out="x")
    with throughout(torch.float64):
        found = by_kvzip(tiny, ids, run)
        by_hand = scores_by_hand(tiny, ids)
    for gates_K, scores_Kn in zip(found, by_hand, strict=True):
        torch.testing.assert_close(gates_K, scores_Kn[:, SINKS:].amax(dim=-1), atol=1e-5, rtol=0)


def test_without_a_penalty_no_gate_moves_and_with_one_alone_all_do(own: Model) -> None:
    """Open gates leave nothing to learn; if nothing is to be answered, small gates are free."""
    ids = prompt(200)
    run = GatesRun(tokens=160, sinks=2, recent=8, steps=4, penalty=0.0, passkeys=1, words=4, out="x")
    assert all((gates_K == 1).all() for gates_K in by_optimising(own, ids, run))
    run.penalty, run.learning_rate = 1e6, 0.1
    for gates_K in by_optimising(own, ids, run):
        torch.testing.assert_close(gates_K, torch.full((2,), 0.6), atol=0.01, rtol=0)


def test_a_text_asks_for_every_passkey_and_says_where_it_is_answered(own: Model) -> None:
    ids = list(range(3, 90)) * 4
    run = GatesRun(tokens=300, passkeys=3, words=5, sinks=2, recent=8, out="x")
    text, answers = passkey_text(own, ids, run, Random(1))
    assert len(text) == 300 and len(answers) == 15
    found = [tuple(text[at + 1] for at in answers[first : first + 5]) for first in range(0, 15, 5)]
    head = text[: answers[0]]
    for passkey in found:
        assert any(tuple(head[at : at + 5]) == passkey for at in range(len(head)))
    assert len(set(found)) == 3
    run.tokens = 120
    with pytest.raises(ValueError, match="tokens=120 has no room for passkeys=3 of words=5 tokens"):
        passkey_text(own, ids, run, Random(1))


@pytest.mark.parametrize("by", ["optimising", "kvzip"])
def test_the_folder_is_taken_by_its_own_model_alone(
    by: str, folder: Path, own: Model, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gates"
    assert ended("duo_gates", folder, sample, out, f"by={by}") == 0
    assert "gates of 6 KV heads in 3 layers" in capsys.readouterr().out
    table = DuoTable.load(out)
    assert (table.sinks, table.recent, table.fingerprint) == (2, 8, own.fingerprint)
    policy = DuoAttention(heads=str(out), retrieval_share=0.5)
    RankPolicies(last=[policy]).check(own)
    assert sum(sum(policy.retrieving(layer, 2)) for layer in range(3)) == 3
    with throughout(torch.float64), pytest.raises(ValueError, match="was made for another model"):
        RankPolicies(last=[policy]).check(tiny_model("llama"))


@cache
def copy_loss(chosen: str, tmp_path: Path) -> float:
    """Loss of a passage that comes again (nats per token), after a prompt of which 25% are kept.

    Args:
        chosen: whose gates are largest: by KVzip, or random ones.
    """
    if chosen == "kvzip":
        run = GatesRun(by=GatesMethod.kvzip, sinks=4, recent=64, samples=2, out="x")
        gates = by_kvzip(model(), text_ids()[4000:].tolist(), run)
    else:
        generator = torch.Generator().manual_seed(int(chosen))
        gates = [torch.rand(shape.num_kv_heads, generator=generator) for shape in model().kv_shapes]
    (tmp_path / chosen).mkdir()
    for name, content in DuoTable(gates=gates, sinks=4, recent=64).files().items():
        (tmp_path / chosen / name).write_text(content, encoding="utf-8")
    losses = []
    for start in STARTS:
        ids = text_ids()[start : start + PASSAGE + FILLER]
        kept = conversation(DuoAttention(heads=str(tmp_path / chosen), retrieval_share=0.18))
        kept.feed(ids[None])
        losses.append(nll(kept, ids[:PASSAGE]))
    return sum(losses) / len(losses)


@pytest.mark.slow
def test_heads_that_kvzip_scores_high_are_worth_more_than_as_many_random_ones(tmp_path: Path) -> None:
    best, random = copy_loss("kvzip", tmp_path), [copy_loss(seed, tmp_path) for seed in ("1", "2")]
    assert best < min(random) - 0.3
