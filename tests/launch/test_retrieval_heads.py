"""python -m policies.retrieval_heads: scores against whole attention matrices, the file, its use."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.retrieval_heads import random_ids, scores_of
from policies.base import ModelFacts
from policies.head_scores import FILES, HeadScores
from policies.razor_attention import RazorAttention
from policies.streaming_heads import best_heads
from runahead import Model
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from tests.families import prompt, throughout
from tests.launch.learning import ended
from tests.policies.test_relations import FILLER, PASSAGE, STARTS, conversation, model, nll, text_ids
from tests.ranks.tasks import tiny_model

# Legend: N query heads, C new tokens, n keys.

PERIOD, COPIES = 9, 4


class Noting(CausalAttention):
    """Causal attention that notes whole matrices (N, n, n) of probabilities by layer."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.found: list[tuple[Tensor, AttentionTerms]] = []

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        n, group = q_BNCH.shape[2], q_BNCH.shape[1] // k_BKCH.shape[1]
        scores_Nnn = q_BNCH[0] @ k_BKCH[0].repeat_interleave(group, dim=0).mT * terms.scaling
        if terms.softcap is not None:
            scores_Nnn = terms.softcap * torch.tanh(scores_Nnn / terms.softcap)
        scores_Nnn = scores_Nnn.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        if terms.sinks_N is not None:
            scores_Nnn = torch.cat([scores_Nnn, terms.sinks_N[:, None, None].expand(-1, n, 1)], dim=-1)
        self.found.append((scores_Nnn.softmax(dim=-1)[..., :n], terms))
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode", "deepseek_v3", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("chunk", [36, 7])
def test_scores_are_those_of_whole_matrices(family: str, chunk: int) -> None:
    """Queries that have copies before them count; a layer with windows has none."""
    ids, in_all = prompt(PERIOD), PERIOD * COPIES
    tiny = tiny_model(family)
    with throughout(torch.float64):
        scores = scores_of(tiny, ids, copies=COPIES, chunk=chunk)
        noting = Noting(tiny.empty_cache(in_all), start=0, pads=[0])
        tiny.forward(torch.tensor([ids * COPIES]), noting, start=0, pads=[0], all_hidden=True)
    for layer, (attention_Nnn, terms) in enumerate(noting.found):
        expected = {0: torch.zeros(len(attention_Nnn)), 1: torch.zeros(len(attention_Nnn))}
        if terms.rule is None:
            for ahead in (0, 1):
                for query in range(PERIOD, in_all):
                    for key in range(query % PERIOD, query, PERIOD):
                        expected[ahead] = expected[ahead] + attention_Nnn[:, query, key + ahead]
        for ahead, found in ((0, scores.echo), (1, scores.induction)):
            wanted_N = (expected[ahead] / (in_all - PERIOD)).double()
            torch.testing.assert_close(found[layer].double(), wanted_N, atol=1e-6, rtol=0)
    assert any(bool((found_N > 0.01).any()) for found_N in scores.induction)


def test_a_model_with_biases_by_distance_is_refused() -> None:
    with throughout(torch.float64), pytest.raises(ValueError, match=r"\(ALiBi\), with which cache policies do not go"):
        scores_of(tiny_model("bloom"), prompt(PERIOD), copies=2, chunk=9)


def test_random_tokens_are_different_and_not_special() -> None:
    ids = random_ids(tiny_model("llama"), 90, seed=1)
    assert len(set(ids)) == 90 and not {2} & set(ids)
    assert ids != random_ids(tiny_model("llama"), 90, seed=2)
    with pytest.raises(ValueError, match="tokens=200 is more than the model's 96 tokens"):
        random_ids(tiny_model("llama"), 200, seed=1)


def test_the_file_is_taken_by_its_own_model_alone(
    folder: Path, own: Model, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "heads=1, of a model.safetensors"
    assert ended("retrieval_heads", folder, sample, out) == 0
    assert "12 query heads of 3 layers; most induction: " in capsys.readouterr().out
    found = HeadScores.load(out, own.fingerprint)
    expected = scores_of(own, random_ids(own, 20, seed=0), copies=4, chunk=512)
    assert all(map(torch.equal, found.induction, expected.induction))
    with pytest.raises(ValueError, match="was made for another model"):
        HeadScores.load(out, "abc")
    facts = ModelFacts(name="other", fingerprint=own.fingerprint, heads=[(3, 8)] * 3)
    with pytest.raises(ValueError, match=r"scores of \[4, 4, 4\] query heads by layer, and model other"):
        RazorAttention(heads=str(out)).require(facts)


@pytest.mark.parametrize(
    "scores_2N", [torch.ones(3, 4), torch.ones(2, 4).double(), torch.ones(2, 4) * 1.5, torch.full((2, 4), torch.nan)]
)
def test_a_file_with_other_tensors_is_refused(tmp_path: Path, scores_2N: Tensor) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(FILES.packed({"layer.0": scores_2N}, "abc"))
    with pytest.raises(ValueError, match=r"policy\.heads=.* wrong names, shapes or values") as raised:
        RazorAttention(heads=str(path))
    assert "\n" not in str(raised.value)


@cache
def copy_loss(chosen: str) -> float:
    """Loss of a passage that comes again (nats per token), after a prompt of which streaming heads keep 12%.

    Args:
        chosen: which tenth of the KV heads retrieves: those with most induction, or as many random ones.
    """
    found = measured().by_kv_head(facts())[0]
    if chosen != "induction":
        generator = torch.Generator().manual_seed(int(chosen))
        found = [torch.rand(len(scores_K), generator=generator) for scores_K in found]

    class Given(RazorAttention):
        def require(self, model: ModelFacts) -> None:
            self._retrieving = best_heads(found, 0.1)

    losses = []
    for start in STARTS:
        ids = text_ids()[start : start + PASSAGE + FILLER]
        kept = conversation(Given(recent=88))
        kept.feed(ids[None])
        losses.append(nll(kept, ids[:PASSAGE]))
    return sum(losses) / len(losses)


@cache
def measured() -> HeadScores:
    return scores_of(model(), random_ids(model(), 128, seed=0), copies=4, chunk=512)


def facts() -> ModelFacts:
    heads = [(shape.num_kv_heads, shape.key_dim) for shape in model().kv_shapes]
    return ModelFacts(name=model().name, fingerprint=model().fingerprint, heads=heads)


@pytest.mark.slow
def test_induction_heads_are_worth_more_than_as_many_random_ones() -> None:
    best, random = copy_loss("induction"), [copy_loss(seed) for seed in ("1", "2")]
    assert best < min(random) - 0.3
