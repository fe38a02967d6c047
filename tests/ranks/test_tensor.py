"""prefill=tensor: transformers' own tensor parallelism in our engine computes what the whole model computes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.ttft.references import PlainTransformers
from runahead import GenerationOptions, Model, ModelOptions, PrefillOptions, Ranks, RanksOptions
from runahead.config import ModelName, PrefillName
from runahead.engine import Engine
from runahead.model.memory import ROWS_SHARE, activation_bytes
from runahead.model.shares import allreduce_bytes
from tests.beat_clock import give_up_silent
from tests.conftest import RankPools
from tests.families import build, largest_difference, prompt, throughout
from tests.rank_pool import RankPool, short_lived_pool
from tests.ranks import tensor_tasks as tasks

TOLERANCE = 1e-9
"""Tolerance of test_exactness.py: another order of sums costs about 1e-14 in float64, the least mistake above 1e-4."""

FLOAT32_TOLERANCE = 1e-4

FAMILIES = [
    "llama",
    "llama_dynamic_ntk",
    "qwen2",
    "qwen3",
    "phi",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "granite",
    "gpt_neox",
    "exaone4",
    "mistral",
    "starcoder2",
    "cohere2",
    "llama4_text",
    "mixtral",
    "qwen3_moe",
]
"""Families of tests/families.py for which every supported transformers has a plan, one of each kind."""

TWELVE_HEADS = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}
NINE_HEADS = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
GREEDY = GenerationOptions(max_new_tokens=6, ignore_eos=True)


@cache
def whole(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return build(family, dtype=dtype, **tasks.SIZES)


def oracle_logits(family: str, ids: list[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    with torch.inference_mode(), throughout(dtype):
        return build(family, dtype=dtype, **tasks.SIZES)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def oracle_tokens(family: str, ids: list[int]) -> list[int]:
    """Tokens of one rank with the whole model."""
    with Ranks.start(RanksOptions()) as ranks, throughout(torch.float64):
        batch = Engine(Model(whole(family)), ranks).generate([ids], GREEDY)
    return batch.generations[0].new_token_ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.sampled(8)
def test_logits_are_the_whole_models_and_bitwise_the_same_on_all_ranks(
    rank_pools: RankPools, family: str, size: int
) -> None:
    ids = prompt(50)
    logits = rank_pools.run(size, tasks.last_logits, family, ids)
    assert largest_difference(logits[0], oracle_logits(family, ids)) < TOLERANCE
    assert all(other == logits[0] for other in logits)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2"])
def test_float32_with_transformers_own_choice_of_kernels(rank_pools: RankPools, family: str) -> None:
    ids = prompt(50)
    for logits in rank_pools.run(2, tasks.last_logits, family, ids, torch.float32):
        assert largest_difference(logits, oracle_logits(family, ids, torch.float32)) < FLOAT32_TOLERANCE


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("llama", 4), ("mistral", 2), ("gemma3_text", 2)])
def test_left_padded_rows_generate_what_one_rank_generates_for_each_alone(
    rank_pools: RankPools, family: str, size: int
) -> None:
    prompts = [prompt(50), prompt(9, seed=1), prompt(31, seed=2)]
    expected = [oracle_tokens(family, ids) for ids in prompts]
    for batch, _ in rank_pools.run(size, tasks.generate, family, prompts, GREEDY):
        assert [generation.new_token_ids for generation in batch.generations] == expected


def test_blocks_of_rows_are_those_of_the_share_with_the_least_memory(rank_pools: RankPools) -> None:
    """Blocks of unlike lengths would be added up, or waited for for ever."""
    ids, with_room_for = prompt(50), [40, 17]
    each = activation_bytes(build("llama", **tasks.SIZES).config, torch.float64, 2) / ROWS_SHARE
    memory = [(tokens + 0.5) * each for tokens in with_room_for]
    for logits, row_tokens in rank_pools.run(2, tasks.in_blocks_by_memory, ids, memory):
        assert row_tokens == min(with_room_for)
        assert largest_difference(logits, oracle_logits("llama", ids)) < TOLERANCE


def test_shares_that_are_wrong_for_the_last_token_alone_compute_all(rank_pools: RankPools) -> None:
    ids = prompt(50)
    for told, logits in rank_pools.run(2, tasks.logits_of_wrong_single_tokens, ids):
        assert [each for each in told if "computes all tokens of a prompt in its last layer" in each]
        assert largest_difference(logits, oracle_logits("llama", ids)) < TOLERANCE


def test_sampling_is_in_step(rank_pools: RankPools) -> None:
    """Ranks that drew different tokens would feed each other's layers different prompts."""
    options = GenerationOptions(max_new_tokens=12, do_sample=True, temperature=2.0, seed=3, ignore_eos=True)
    with Ranks.start(RanksOptions()) as ranks, throughout(torch.float64):
        alone = Engine(Model(whole("llama")), ranks).generate([prompt(20)], options)
    for batch, _ in rank_pools.run(2, tasks.generate, "llama", [prompt(20)], options):
        assert batch.generations[0].new_token_ids == alone.generations[0].new_token_ids


def test_report_counts_what_every_rank_did(rank_pools: RankPools) -> None:
    results = rank_pools.run(2, tasks.generate, "llama", [prompt(40)], GREEDY)
    with Ranks.start(RanksOptions()) as ranks:
        alone = Engine(Model(whole("llama")), ranks).generate([prompt(40)], GREEDY).ranks[0]
    for batch, _ in results:
        assert batch.boundaries == [0, 40]
        assert batch.chunks == "all 40 tokens on every rank"
        assert [rank.kv_peak_bytes for rank in batch.ranks] == [alone.kv_peak_bytes // 2] * 2
        assert all(rank.kv_sent_bytes == rank.kv_received_bytes == 0 for rank in batch.ranks)
        assert all(len([span for span in spans if span.layer is not None]) == 3 for spans in batch.spans)
    (_, first_steps), (_, other_steps) = results
    assert (len(first_steps), len(other_steps)) == (6, 0)


def test_rank_holds_its_share_of_the_weights_and_no_more(rank_pools: RankPools) -> None:
    total = sum(parameter.nbytes for parameter in whole("llama").parameters())
    norms = sum(parameter.nbytes for parameter in whole("llama").parameters() if parameter.ndim == 1)
    embeddings = whole("llama").get_input_embeddings().weight.nbytes
    for held in rank_pools.run(4, tasks.bytes_of_weights, "llama"):
        # Whether embeddings are shared out depends on the version of transformers.
        assert total / 4 < held <= (total - norms - embeddings) / 4 + norms + embeddings


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_and_random_weights_are_those_of_one_rank(
    rank_pools: RankPools, tmp_path: Path, tied: bool
) -> None:
    module = build("llama", dtype=torch.float32, tie_word_embeddings=tied, **tasks.SIZES)
    module.save_pretrained(tmp_path)
    sources = [
        ModelOptions(name=ModelName.hf, path=str(tmp_path)),
        ModelOptions(name=ModelName.random, config=str(tmp_path), seed=5),
    ]
    for options in sources:
        for shared, alone in rank_pools.run(2, tasks.tokens_of_loaded, options, prompt(30)):
            assert shared == alone


def test_allreduce_bytes_are_the_ring_formula() -> None:
    model = Model(whole("llama"))
    per_rank = 2 * (4 - 1) / 4 * (10 * 64 * 8)  # of one all-reduce of 10 tokens, 64 wide, in float64
    assert allreduce_bytes(model, 10, 4) == 4 * 2 * 3 * per_rank
    assert allreduce_bytes(model, 10, 1) == 0


class TestRefusals:
    """One sentence that names the value and the remedy, on every rank."""

    @pytest.mark.parametrize(
        ("family", "sizes", "size", "expected"),
        [
            ("gpt2", {}, 2, "transformers has no tensor-parallel plan for gpt2, so ranks cannot share"),
            ("falcon", {}, 2, "no tensor-parallel plan for falcon"),
            ("cohere", {}, 2, "use_qk_norm=true of this cohere model gives each head a norm of its"),
            (
                "llama",
                TWELVE_HEADS,
                4,
                "12 heads and 6 KV heads cannot be shared out to 4 ranks; 1, 2, 3, 6 or 12 would",
            ),
            ("llama", NINE_HEADS, 2, "3 KV heads cannot be shared out to 2 ranks; 1, 3 or 9 would do"),
        ],
    )
    def test_model_that_cannot_be_shared_out(
        self, rank_pools: RankPools, family: str, sizes: dict[str, int], size: int, expected: str
    ) -> None:
        for message in rank_pools.run(size, tasks.message_of, tasks.shard_whole, family, sizes):
            assert message.startswith("ValueError: ")
            assert expected in message
            assert "\n" not in message

    def test_engine_with_a_model_of_the_wrong_kind(self, rank_pools: RankPools) -> None:
        for message in rank_pools.run(2, tasks.message_of, tasks.whole_model_in_a_stage):
            assert "ranks.tensor=2 ranks need a model in as many shares, and this one has 1" in message
        for message in rank_pools.run(2, tasks.message_of, tasks.shared_model_on_single_ranks):
            assert "ranks.tensor=1 ranks need a model in as many shares, and this one has 2" in message
        for message in rank_pools.run(2, tasks.message_of, tasks.tensor_in_stages):
            assert "prefill=tensor is one stage of all ranks, and these are 2 stages" in message

    def test_program_refuses_before_weights_are_made(self, rank_pools: RankPools, tmp_path: Path) -> None:
        build("llama", **tasks.SIZES).config.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text()) | {"num_key_value_heads": 3}
        config["hidden_size"] = 1 << 40  # weights of this size would be refused in other words
        (tmp_path / "config.json").write_text(json.dumps(config))
        overrides = ["prefill=tensor", "model=random", f"model.config={tmp_path}", "prompt.random_tokens=5"]
        told = rank_pools.run(2, tasks.message_of, tasks.run_program, overrides)
        assert told[0].startswith("ValueError: 8 heads and 3 KV heads cannot be shared out to 2 ranks")
        assert told[1].startswith("SharedError: ")


class TestPeerFailure:
    """A rank that is gone in the middle of a layer ends the others, which wait inside transformers' forward."""

    @pytest.fixture
    def pool(self) -> Iterator[RankPool]:
        with short_lived_pool(2) as pool:
            yield pool

    def test_killed_rank(self, pool: RankPool) -> None:
        with pytest.raises(RuntimeError, match="rank 1:\nthe process has ended") as caught:
            pool.run(tasks.generate_and_act, 2, 1, 2, "kill")
        assert re.search(
            r"PeerFailure: rank 1 \(stage 0, share 1\) has ended .*the other ranks' shares of the layers",
            str(caught.value),
        )

    def test_stopped_rank(self, pool: RankPool) -> None:
        pool.run(tasks.make_ready)  # which takes longer than a rank may be silent
        pool.run(give_up_silent, 1.5, 1)
        pool.stopped = 1
        with pytest.raises(RuntimeError, match="rank 1:\nno answer") as caught:
            pool.run(tasks.generate_and_act, 2, 1, 2, "stop")
        assert re.search(
            r"PeerFailure: rank 1 \(stage 0, share 1\) has been silent .*the other ranks' shares", str(caught.value)
        )

    def test_rank_that_fails(self, pool: RankPool) -> None:
        with pytest.raises(RuntimeError, match="ValueError: out of luck") as caught:
            pool.run(tasks.generate_and_act, 2, 1, 2, "raise")
        assert "PeerFailure: rank 1 (stage 0, share 1) failed: out of luck" in str(caught.value)


def test_plain_transformers_finds_the_same_first_token(tmp_path: Path) -> None:
    whole("llama", torch.float32).save_pretrained(tmp_path)
    options = ModelOptions(name=ModelName.hf, path=str(tmp_path))
    threads = torch.get_num_threads()
    plain = PlainTransformers(options, device=torch.device("cpu"), num_threads=threads + 1)
    with Ranks.start(RanksOptions(threads=threads)) as ranks:
        engine = Engine(Model.load(options, ranks.device), ranks, prefill=PrefillOptions(name=PrefillName.single))
        ours = engine.generate([prompt(40)], GenerationOptions(max_new_tokens=1)).generations[0].new_token_ids
    token, seconds = plain.first_token(prompt(40))
    assert [token] == ours
    assert seconds > 0
    assert plain.first_token(prompt(40))[1] > 0
    assert torch.get_num_threads() == threads
