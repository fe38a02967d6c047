"""The methods that KV-Runahead is compared with are exact too, move what their formulas say, and fail as clearly."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from runahead import GenerationOptions, PrefillOptions
from runahead.config import PrefillName, Profile
from runahead.timeline.picture import timeline_png
from tests.beat_clock import give_up_silent
from tests.conftest import RankPools
from tests.families import FAMILIES, PRODUCTS, largest_difference, oracle_logits, oracle_tokens, prompt
from tests.rank_pool import short_lived_pool
from tests.ranks import peer_tasks, tasks
from tests.ranks.silence import Silence
from tests.ranks.test_batch import BATCH
from tests.ranks.test_exactness import FLOAT32_TOLERANCE, PROMPT_TOKENS, TOLERANCE
from tests.ranks.test_memory import DEEP_LAYERS, LAYER_BYTES

VARIANTS: dict[str, PrefillOptions] = {
    "tsp causal": PrefillOptions(name="tsp"),
    "tsp dense": PrefillOptions(name="tsp", attention="dense"),
    "zigzag all_gather": PrefillOptions(name="zigzag"),
    "zigzag ring": PrefillOptions(name="zigzag", exchange="ring"),
    "zigzag direct": PrefillOptions(name="zigzag", exchange="direct"),
}
CONTIGUOUS = {name: options for name, options in VARIANTS.items() if options.name is PrefillName.tsp}
"""Families whose positions cannot be given."""

SELECTED = [
    "llama",
    "phi3_longrope",
    "mistral",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "gpt2",
    "bloom",
    "falcon_alibi",
]
"""One of each kind: plain, RoPE that depends on length, windows in all and in some layers, sinks, other widths of
values, learned positions, biases on keys."""


def variants_of(family: str, size: int) -> dict[str, PrefillOptions]:
    return CONTIGUOUS if size > 1 and family in ("bart", "llama4_text_tempered") else VARIANTS


def check_logits(
    rank_pools: RankPools, size: int, family: str, prompts: list[list[int]], tolerance: float, dtype: torch.dtype
) -> None:
    """Every variant's logits of every row, on the one rank that has them: the last one."""
    variants = variants_of(family, size)
    by_rank = rank_pools.run(size, peer_tasks.prefill_each, family, prompts, list(variants.values()), 1, dtype)
    for variant, *outcomes in zip(variants, *by_rank, strict=True):
        assert [outcome.logits is not None for outcome in outcomes] == [False] * (size - 1) + [True], variant
        for ids, ours in zip(prompts, outcomes[-1].logits, strict=True):
            assert largest_difference(ours, oracle_logits(family, tuple(ids), dtype)) < tolerance, (variant, len(ids))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(3)
def test_first_logits_equal_transformers_for_every_family(rank_pools: RankPools, family: str) -> None:
    check_logits(rank_pools, 3, family, [prompt(PROMPT_TOKENS)], TOLERANCE, torch.float64)


@pytest.mark.parametrize("family", SELECTED)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.sampled(8)
def test_first_logits_equal_transformers_for_any_length(rank_pools: RankPools, family: str, size: int) -> None:
    """No number of chunks divides some lengths, and some are fewer tokens than ranks or chunks."""

    @seed(zlib.crc32(f"{size} {family}".encode()))
    @settings(max_examples=3, phases=[Phase.generate])
    @given(num_tokens=st.one_of(st.integers(1, 2 * size + 1), st.integers(10, 90)))
    def check(num_tokens: int) -> None:
        check_logits(rank_pools, size, family, [prompt(num_tokens)], TOLERANCE, torch.float64)

    check()


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_fewer_tokens_than_chunks(rank_pools: RankPools, num_tokens: int) -> None:
    check_logits(rank_pools, 4, "gemma3_text", [prompt(num_tokens)], TOLERANCE, torch.float64)


@pytest.mark.parametrize("family", [*SELECTED, "llama_dynamic_ntk", "gemma2", "mpt"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.sampled(3)
def test_padded_rows_equal_transformers_on_each_prompt_alone(rank_pools: RankPools, family: str, size: int) -> None:
    check_logits(rank_pools, size, family, BATCH, TOLERANCE, torch.float64)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "bloom"])
def test_float32_with_transformers_own_choice_of_kernels(rank_pools: RankPools, family: str) -> None:
    check_logits(rank_pools, 2, family, [prompt(PROMPT_TOKENS)], FLOAT32_TOLERANCE, torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.sampled(3)
def test_greedy_tokens_equal_generate_on_every_rank(rank_pools: RankPools, variant: str, size: int) -> None:
    """Decoding goes on over the K,V that the exchange left on the last rank."""
    options = GenerationOptions(max_new_tokens=6, ignore_eos=True)
    for family in ("llama", "mistral", "mpt"):
        args = (family, BATCH, options, None, VARIANTS[variant])
        for batch, _ in rank_pools.run(size, tasks.generate, *args):
            for ids, row in zip(BATCH, batch.generations, strict=True):
                assert row.new_token_ids == oracle_tokens(family, tuple(ids), 6)


@pytest.mark.parametrize(("size", "num_tokens"), [(2, 72), (3, 72), (4, 72), (3, 70), (4, 71)])
def test_bytes_and_memory_are_what_the_formulas_say(rank_pools: RankPools, size: int, num_tokens: int) -> None:
    num_new, token_bytes = 5, DEEP_LAYERS * LAYER_BYTES
    args = ("llama_deep", [prompt(num_tokens)], list(VARIANTS.values()), num_new)
    for variant, *ranks in zip(VARIANTS, *rank_pools.run(size, peer_tasks.prefill_each, *args), strict=True):
        own = [outcome.chunk_tokens for outcome in ranks]
        assert sum(own) == num_tokens
        assert max(own) - min(own) <= 2
        sent = sum(outcome.kv_sent_bytes for outcome in ranks)
        assert sent == sum(outcome.kv_received_bytes for outcome in ranks)
        if variant != "zigzag direct":
            assert sent == (size - 1) * num_tokens * token_bytes
            for outcome in ranks:
                assert outcome.kv_received_bytes == (num_tokens - outcome.chunk_tokens) * token_bytes
        elif num_tokens % (2 * size) == 0:
            # An early chunk goes to all others, a late one to the later ranks; in the last layer both to the last.
            chunk_bytes = num_tokens // (2 * size) * LAYER_BYTES
            pairs = size * (size - 1)
            assert sent == ((DEEP_LAYERS - 1) * (pairs + pairs // 2) + 2 * (size - 1)) * chunk_bytes
        *others, last = [outcome.kv_peak_bytes for outcome in ranks]
        assert others == [2 * num_tokens * LAYER_BYTES] * (size - 1)
        assert last == (num_tokens + num_new - 1) * token_bytes


def test_direct_exchange_sends_no_more_than_windows_reach(rank_pools: RankPools) -> None:
    variants = [VARIANTS["zigzag direct"], VARIANTS["zigzag all_gather"]]
    by_rank = rank_pools.run(2, peer_tasks.prefill_each, "mistral", [prompt(80)], variants)
    direct, gathered = (sum(rank[i].kv_sent_bytes for rank in by_rank) for i in range(2))
    assert gathered == 80 * 3 * LAYER_BYTES
    # Chunks of 20, a window of 16: in two layers the late and the early chunk need 15 tokens each of the other rank,
    # in the last one only the rank with the prompt's end does.
    assert direct == (2 * 2 * 15 + 15) * LAYER_BYTES


@pytest.mark.parametrize("variant", VARIANTS)
def test_timeline_shows_every_layer_and_send(rank_pools: RankPools, variant: str) -> None:
    batch = rank_pools.run(
        3,
        peer_tasks.generate_with_timeline,
        "llama_deep",
        [prompt(PROMPT_TOKENS)],
        VARIANTS[variant],
        1,
        Profile.none,
    )[0]
    assert batch.recordings == []
    assert batch.boundaries[0] == 0
    assert batch.boundaries[-1] == PROMPT_TOKENS
    for rank, spans in enumerate(batch.spans):
        computed = {span.layer for span in spans if span.kind == "compute"}
        assert computed - {None} == set(range(DEEP_LAYERS))
        assert (None in computed) == (rank == 2)
        assert all(span.end_s >= span.start_s for span in spans)
        sends = {span.layer for span in spans if span.kind == "send"}
        assert sends >= set(range(DEEP_LAYERS - 1))
        waits_s = sum(span.end_s - span.start_s for span in spans if span.kind == "wait")
        assert waits_s == pytest.approx(batch.ranks[rank].wait_s, abs=0.05)
    assert timeline_png(batch.spans, ttft_s=batch.ttft_s).startswith(b"\x89PNG")


@pytest.mark.parametrize("prefill", [PrefillOptions(), PrefillOptions(transfer="direct"), VARIANTS["zigzag ring"]])
def test_a_profile_of_every_rank_has_its_layers_messages_and_operators(
    rank_pools: RankPools, prefill: PrefillOptions
) -> None:
    """The clock is the timeline's: what is posted lies inside the layer whose keys and values are sent."""
    batch = rank_pools.run(
        2, peer_tasks.generate_with_timeline, "llama_deep", [prompt(PROMPT_TOKENS)], prefill, 3, Profile.torch
    )[0]
    assert len(batch.recordings) == 2
    last = {rank: max(span.end_s for span in spans) for rank, spans in enumerate(batch.spans)}
    for rank, recording in enumerate(batch.recordings):
        events = [(each["name"], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6) for each in recording.events()]
        layers = {name: (begin, end) for name, begin, end in reversed(events) if name.startswith("layer ")}
        assert set(layers) == {f"layer {layer}" for layer in range(DEEP_LAYERS)}
        assert all(-1e-2 < begin < end < last[rank] + 1e-2 for begin, end in layers.values()), "of the prompt"
        sends = [(name, begin) for name, begin, _ in events if name.startswith("send ")]
        assert {name.split()[2] for name, _ in sends} >= ({*map(str, range(DEEP_LAYERS - 1))} if rank == 0 else set())
        for name, begin in sends:
            of_layer = layers["layer " + name.split()[2]]
            assert of_layer[0] <= begin <= of_layer[1], name
        assert any(name == "decoding step" for name, *_ in events) == (rank == 1)
        assert any(name in PRODUCTS for name, *_ in events)


@pytest.mark.parametrize("family", ["bart", "llama4_text_tempered"])
def test_zigzag_refuses_families_that_count_positions_themselves(rank_pools: RankPools, family: str) -> None:
    args = (family, [prompt(20)], [VARIANTS["zigzag all_gather"]])
    rank_pools.run(1, peer_tasks.prefill_each, *args)  # one rank's tokens lie side by side
    with pytest.raises(RuntimeError, match=r"ValueError: model .* counts positions itself.*use prefill=kv_runahead"):
        rank_pools.run(2, peer_tasks.prefill_each, *args)


@pytest.mark.parametrize(
    ("variant", "is_silent"),
    [("zigzag ring", False), ("tsp causal", True)],
    ids=["a rank of a ring is killed", "a rank is silent"],
)
def test_failure_of_one_rank_ends_the_others_with_its_name(variant: str, is_silent: bool, tmp_path: Path) -> None:
    silence = Silence.made(1, 3, tmp_path) if is_silent else None
    with short_lived_pool(3) as pool, suppress(RuntimeError):  # the killed rank's answer never comes
        if is_silent:
            pool.run(give_up_silent, 1.5, 1)
        pool.run(peer_tasks.fail_in_layer, VARIANTS[variant], 1, 4, silence, str(tmp_path))
    for rank in (0, 2):
        ended = (tmp_path / str(rank)).read_text()
        assert ended.startswith("PeerFailure: ")
        assert "rank 1" in ended
