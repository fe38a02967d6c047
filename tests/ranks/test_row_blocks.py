"""Layers that compute their tokens in blocks of rows give transformers' logits, for every family, split and block."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks, RanksOptions
from runahead.attention.base import Recording
from runahead.cache.attention import CausalAttention
from runahead.cache.new_tokens import NewTokens
from runahead.config import PrefillName, Transfer
from runahead.model.checks import checked_model
from runahead.model.layers.pieces import give_in_blocks
from runahead.model.seam import SeamCache
from runahead.prefill import reusing
from runahead.prefill.stage_run import StageRun
from tests.conftest import RankPools
from tests.families import (
    FAMILIES,
    HYBRIDS,
    SHARING,
    build,
    largest_difference,
    oracle_logits,
    oracle_tokens,
    prompt,
    throughout,
)
from tests.partitions import boundaries
from tests.ranks import tasks
from tests.ranks.test_exactness import PROMPT_TOKENS, TOLERANCE
from tests.ranks.test_prompt_scores import COMMON, NUMBER, require_scores

ALL = {**FAMILIES, **SHARING, **HYBRIDS}
ROOT = Path(__file__).parents[2]
PADDED = [prompt(40), prompt(23, seed=1), prompt(9, seed=2)]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.sampled(16)
def test_first_logits_are_those_of_transformers(rank_pools: RankPools, family: str, size: int) -> None:
    ids = prompt(PROMPT_TOKENS)
    expected = oracle_logits(family, tuple(ids))

    @seed(zlib.crc32(f"{size} {family}".encode()))
    @settings(max_examples=3, phases=[Phase.generate])
    @given(
        bounds=boundaries(PROMPT_TOKENS, size), row_tokens=st.integers(1, 40), transfer=st.sampled_from(list(Transfer))
    )
    def check(bounds: tuple[int, ...], row_tokens: int, transfer: Transfer) -> None:
        options = PrefillOptions(row_tokens=row_tokens, transfer=transfer)
        outcomes = rank_pools.run(size, tasks.prefill, family, [ids], bounds, options)
        (logits,) = [outcome.logits for outcome in outcomes if outcome.logits is not None]
        assert largest_difference(logits[0], expected) < TOLERANCE, (bounds, row_tokens, transfer)

    check()


@pytest.mark.parametrize("family", COMMON)
@pytest.mark.parametrize("row_tokens", [1, 7, 16])
@pytest.mark.sampled(8)
def test_answers_to_padded_rows(rank_pools: RankPools, family: str, row_tokens: int) -> None:
    """Blocks that are padding of a row, and blocks in which a row begins."""
    texts = PADDED if tasks.tiny_model(family).uneven_limit is None else [PADDED[0]]
    options = GenerationOptions(max_new_tokens=4, ignore_eos=True)
    prefill = PrefillOptions(row_tokens=row_tokens)
    for batch, _ in rank_pools.run(2, tasks.generate, family, texts, options, (0, 19, 40), prefill):
        for ids, found in zip(texts, batch.generations, strict=True):
            assert found.new_token_ids == oracle_tokens(family, tuple(ids), 4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3n_text", "qwen3_next"])
def test_log_probabilities_of_a_prompt(rank_pools: RankPools, family: str) -> None:
    texts = [prompt(61), prompt(61, seed=1)]
    found = rank_pools.run(2, tasks.score, family, texts, (0, 40, 61), PrefillOptions(row_tokens=9), NUMBER)
    require_scores(found, family, texts)


def in_blocks(model: Model, row_tokens: int | None = 7) -> Tensor:
    attention = CausalAttention(model.empty_cache(20), start=0, pads=[0])
    return model.forward(torch.tensor([prompt(20)]), attention, start=0, pads=[0], row_tokens=row_tokens)


def test_blocks_that_do_not_see_those_before_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is compared with itself the first time; here each block attends as if it were the first."""
    with throughout(torch.float64):
        model = Model(build("llama"))
        monkeypatch.setattr(CausalAttention, "_tokens_of_block", lambda attention: attention.tokens)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"other logits where layers compute a chunk in blocks .* prefill.row_tokens=0"
            ):
                in_blocks(model)


def test_a_comparison_that_was_interrupted_is_made_by_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with throughout(torch.float64):
        model = Model(build("llama"))
        with monkeypatch.context() as changed:
            changed.setattr(checked_model, "differ", Mock(side_effect=[KeyboardInterrupt, torch.OutOfMemoryError]))
            for error in (KeyboardInterrupt, torch.OutOfMemoryError):
                with pytest.raises(error):
                    in_blocks(model)
        with monkeypatch.context() as changed:
            changed.setattr(checked_model, "differ", lambda *_: "off by 1")
            with pytest.raises(ValueError, match="off by 1"):
                in_blocks(model)


@pytest.mark.parametrize("error", [None, TypeError])
def test_layers_compute_a_long_chunk_at_once_where_blocks_are_wrong_and_nobody_asked_for_them(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    monkeypatch.setattr(reusing, "LEAST_ROW_TOKENS", 1)
    monkeypatch.setattr(reusing, "row_tokens", lambda *_: 16)
    tokens_of_block = CausalAttention._tokens_of_block

    def broken(attention: CausalAttention) -> NewTokens:
        if error is not None and attention.block.first > 0:
            raise error
        return attention.tokens if error is None else tokens_of_block(attention)

    monkeypatch.setattr(CausalAttention, "_tokens_of_block", broken)
    ids, greedy = prompt(PROMPT_TOKENS), GenerationOptions(max_new_tokens=4, ignore_eos=True)
    with Ranks.start(RanksOptions()) as ranks, throughout(torch.float64):
        engine = Engine(Model(build("llama")), ranks)
        with pytest.warns(UserWarning, match="other logits .* in blocks of rows .*; they compute it at once") as told:
            batches = [engine.generate([ids], greedy) for _ in range(2)]
    assert len([each for each in told if "in blocks of rows" in str(each.message)]) == 1
    for batch in batches:
        assert batch.generations[0].new_token_ids == oracle_tokens("llama", tuple(ids), 4)
        assert batch.ranks[0].row_tokens is None


def test_blocks_are_compared_before_the_clock_starts_and_those_that_were_asked_for_at_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a prefill takes is learned from, and other stages wait for it."""
    called, compute = list[str](), StageRun.compute
    compare = Model._compare_blocks
    monkeypatch.setattr(reusing, "LEAST_ROW_TOKENS", 1)
    monkeypatch.setattr(reusing, "row_tokens", lambda *_: 16)
    monkeypatch.setattr(Model, "_compare_blocks", lambda model: called.append("compared") or compare(model))
    monkeypatch.setattr(StageRun, "compute", lambda *args, **more: called.append("computed") or compute(*args, **more))
    with Ranks.start(RanksOptions()) as ranks, throughout(torch.float64):
        engine = Engine(Model(build("llama")), ranks)
        for num_tokens in (16, 17):
            engine.generate([prompt(num_tokens)], GenerationOptions(max_new_tokens=1))
        assert called == ["computed", "compared", "computed"]
        monkeypatch.setattr(CausalAttention, "_tokens_of_block", lambda attention: attention.tokens)
        with pytest.raises(ValueError, match=r"other logits .* in blocks of rows .* prefill.row_tokens=0"):
            Engine(Model(build("llama")), ranks, prefill=PrefillOptions(row_tokens=16))


class Routed(nn.Module):
    """A layer that returns its output with logits (B * C, E) of a router, means (B, C), a count and a tensor of it."""

    def forward(self, x_BCD: Tensor, **_: Any) -> tuple[Any, ...]:
        return 2 * x_BCD, x_BCD.flatten(0, 1)[:, :3], x_BCD.mean(dim=-1), 5, x_BCD + 1


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_layer_returns_beside_tokens_of_its_rows_is_left_out_in_blocks(in_place: bool) -> None:
    layer, x_BCD = Routed(), torch.rand(2, 10, 4)
    expected = [each.clone() for each in (2 * x_BCD, x_BCD + 1)]
    give_in_blocks([(layer, False)])
    seam = SeamCache(Recording(start=0, pads=[0, 0]), 0, num_new=10, block_ends=[3, 6, 10], in_place=in_place)
    doubled, routed, means, count, more = layer(x_BCD, cache=seam)
    assert (routed, means, count) == (None, None, 5)
    assert torch.equal(doubled, expected[0]) and torch.equal(more, expected[1])


def test_layers_whose_input_is_read_again_do_not_write_over_it() -> None:
    with throughout(torch.float64):
        module = build("llama")
        layers, first = module.model.layers, list[torch.Tensor]()
        layers[0].register_forward_pre_hook(lambda _, given: first.append(given[0]))
        layers[1].register_forward_hook(lambda *called: called[2] + first[-1])
        model = Model(module)
        ids_1C, logits = torch.tensor([prompt(20)]), []
        for row_tokens in (None, 7):
            attention = CausalAttention(model.empty_cache(20), start=0, pads=[0])
            logits.append(model.forward(ids_1C, attention, start=0, pads=[0], row_tokens=row_tokens))
    assert not model._writes_in_place
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE


def test_a_single_stage_has_blocks_too(rank_pools: RankPools) -> None:
    ids, options = prompt(PROMPT_TOKENS), GenerationOptions(max_new_tokens=4, ignore_eos=True)
    single = PrefillOptions(name=PrefillName.single, row_tokens=16)
    for batch, _ in rank_pools.run(2, tasks.generate, "mistral", [ids], options, None, single):
        assert batch.generations[0].new_token_ids == oracle_tokens("mistral", tuple(ids), 4)


@pytest.mark.slow
def test_peak_memory_is_as_predicted_and_activations_are_less_than_half(tmp_path: Path) -> None:
    """The first rank of two, whose chunk is almost all of the prompt; by the whole process, in processes of its own."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 576}
    config |= {"intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "launch/infer.py"]
    command += ["model=random", f"model.config={tmp_path}", "model.dtype=float32", "prompt.random_tokens=12544"]
    command += ["partition=ratios", "partition.ratios=[0.9796,0.0204]", "generation.max_new_tokens=1", "ranks=cpu"]
    command += ["ranks.threads=1", f"report={tmp_path / 'report.json'}"]
    activations = []
    for row_tokens in (0, 512, 2048):
        subprocess.run([*command, f"prefill.row_tokens={row_tokens}"], cwd=ROOT, check=True, capture_output=True)
        rank = json.loads((tmp_path / "report.json").read_text())["ranks"][0]
        memory = rank["memory"]
        if row_tokens:
            assert memory["peak_bytes"] == pytest.approx(memory["predicted_peak_bytes"], rel=0.05)
        held = memory["base_bytes"] + memory["weights_bytes"] + rank["kv_peak_bytes"]
        activations.append(memory["peak_bytes"] - held)
    assert max(activations[1:]) < 0.5 * activations[0]
