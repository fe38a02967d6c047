"""Retrieval from page-locked host memory: the same tokens as on a CPU, and nothing of the K,V on the device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import lines
from benchmarks.studies import offloading
from policies.base import Policy
from policies.exact_topk import ExactTopK
from policies.full import Full
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.pool import Pool
from policies.quest import Quest
from policies.sparq import SparQ
from runahead.cache.host.layer import HostLayer
from runahead.cache.host.memory import host_empty, on_device
from runahead.config import GenerationOptions
from runahead.conversation import Conversation
from runahead.retrieval.cache import RetrievedCache
from runahead.retrieval.retrieval import Retrieval
from runahead.thinning.rank_policies import RankPolicies
from tests.gpu.models import CPU, CUDA, NUM_LAYERS, model

POLICIES: dict[str, Policy] = {
    "infinigen": InfiniGen(min_tokens=0, ahead=True, first_ahead=1, fetch=64, first_layer=1),
    "infinigen, alpha": InfiniGen(min_tokens=0, ahead=True, first_ahead=1, alpha=2.0, max_fetch=0.5, first_layer=1),
    "infinigen, all": InfiniGen(min_tokens=0, ahead=True, first_ahead=1, alpha=math.inf, max_fetch=1.0, first_layer=1),
    "infinigen, full pool": InfiniGen(
        min_tokens=0,
        ahead=True,
        first_ahead=1,
        fetch=64,
        first_layer=1,
        pool=Pool(bytes=130 * (NUM_LAYERS - 1) * 2 * 2 * 64 * 4),
    ),
    "quest": Quest(min_tokens=0, fetch=64),
    "quest, a turn retrieves": Quest(min_tokens=0, fetch=64, turn_tokens=8),
    "sparq": SparQ(min_tokens=0, fetch=64),
    "exact_topk": ExactTopK(min_tokens=0, fetch=64),
    "offload": Offload(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_reads_and_writes_page_locked_memory(dtype: torch.dtype) -> None:
    host = host_empty((50, 8), dtype, CUDA)
    host.copy_(torch.randn(50, 8))
    rows = torch.tensor([3, 49, 0], device=CUDA)
    assert torch.equal(on_device(host, CUDA).index_select(0, rows).cpu(), host[[3, 49, 0]])
    on_device(host, CUDA)[7] = 1.0
    torch.cuda.synchronize()
    assert torch.equal(host[7], torch.ones(8, dtype=dtype))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("lengths", [(200,), (200, 120)], ids=["alone", "padded"])
@pytest.mark.sampled(2)
def test_a_gpu_says_what_the_cpu_says(name: str, lengths: tuple[int, ...]) -> None:
    draw, longest = torch.Generator().manual_seed(2), max(lengths)
    ids_BC = torch.randint(211, (len(lengths), longest), generator=draw)
    pads = [longest - length for length in lengths]
    said = []
    for device in (CPU, CUDA):
        conversation = Conversation(model(device), RankPolicies.everywhere([POLICIES[name]]))
        conversation.feed(ids_BC, pads=pads)
        decoded = conversation.generate(GenerationOptions(max_new_tokens=12, ignore_eos=True))
        conversation.feed(torch.tensor([[5, 6, 7]]))
        decoded_more = conversation.generate(GenerationOptions(max_new_tokens=5, ignore_eos=True))
        said.append([row.new_ids for row in (*decoded.rows, *decoded_more.rows)])
        if device.type == "cuda":
            assert isinstance(conversation.cache, RetrievedCache)
            in_pool = conversation.cache.retrieval.in_pool
            assert [isinstance(layer, HostLayer) for layer in conversation.cache.layers] == in_pool
            assert [layer.slab_TBKX.is_pinned() for layer in conversation.cache.layers] == in_pool
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["infinigen", "infinigen, full pool"])
def test_a_fixed_number_needs_no_look_by_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing, fetching and storing never wait for the device, nor does writing over a token of a full pool."""
    conversation = Conversation(model(CUDA), RankPolicies.everywhere([POLICIES[name]]))
    conversation.feed(torch.randint(211, (1, 300)))
    conversation.follow(torch.tensor([[1, 2, 3]]))  # tables and buffers are made
    called, originals = [], {name: getattr(Retrieval, name) for name in ("look_ahead", "fetched", "store_new")}
    for name in originals:

        def strictly(self: Retrieval, *args: Any, does: Any = originals[name], name: str = name, **more: Any) -> Any:
            called.append(name)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return does(self, *args, **more)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Retrieval, name, strictly)
    conversation.follow(torch.tensor([[4]]))
    assert originals.keys() == set(called)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["infinigen, all", "offload"])
def test_half_precision_where_all_is_fetched_is_the_full_cache(name: str, dtype: torch.dtype) -> None:
    ids_1C, decoded = torch.randint(211, (1, 300), generator=torch.Generator().manual_seed(2)), []
    for policy in (POLICIES[name], Full()):
        conversation = Conversation(model(CUDA, dtype), RankPolicies.everywhere([policy]))
        conversation.feed(ids_1C)
        decoded.append(conversation.follow(torch.tensor([[5, 7, 11]])))
    # Half precision keeps 8 bits of a number at least; where another kernel runs the last one may differ.
    torch.testing.assert_close(*decoded, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["infinigen", "infinigen, alpha", "infinigen, full pool", "quest", "sparq", "exact_topk"]
)
def test_half_precision_retrieves(name: str, dtype: torch.dtype) -> None:
    conversation = Conversation(model(CUDA, dtype), RankPolicies.everywhere([POLICIES[name]]))
    conversation.feed(torch.randint(211, (2, 300)), pads=[0, 120])
    assert conversation.follow(torch.tensor([[5, 7, 11]])).isfinite().all()


def test_what_is_fetched_does_not_pile_up_on_the_device() -> None:
    """The host queues a whole step before the device has done much of it; only two layers are there at a time."""
    conversation = Conversation(model(CUDA), RankPolicies.everywhere([Offload()]))
    conversation.feed(torch.randint(211, (1, 1000)))
    conversation.follow(torch.tensor([[1, 2]]))
    layer_bytes = 1000 * conversation.model.kv_shapes[0].bytes_per_token()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    conversation.follow(torch.tensor([[3, 4, 5]]))
    # Two layers, and their keys and values once more per query head, which attention in float32 makes of one of them.
    assert torch.cuda.max_memory_allocated() - before < 4.5 * layer_bytes


def test_a_fork_and_a_second_turn_leave_the_pool_as_it_is() -> None:
    ids_1C = torch.randint(211, (1, 300), generator=torch.Generator().manual_seed(2))
    turns, alone = (Conversation(model(CUDA), RankPolicies.everywhere([POLICIES["infinigen"]])) for _ in range(2))
    for each in (turns, alone):
        each.feed(ids_1C)
    other = turns.fork()
    other.follow(torch.tensor([[17, 19]]))
    other.feed(torch.tensor([[1, 2]]))
    for each in (turns, alone):
        each.feed(ids_1C[:, :9])
    assert torch.equal(turns.follow(torch.tensor([[5, 7]])), alone.follow(torch.tensor([[5, 7]])))


def test_exactly_the_pool_is_page_locked() -> None:
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    host = host_empty((1000, 77), torch.bfloat16, CUDA)
    assert host.is_pinned() and host.nbytes == 154000
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before  # torch would round it up


@pytest.mark.slow  # on a virtual GPU
def test_the_benchmark_runs(tmp_path: Path) -> None:
    given = ["--shape", "tiny", "--contexts", "512", "--batch", "1", "--rounds", "1", "--tokens", "2"]
    given += ["--lines", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path)]
    offloading.STUDY.main([*given, "--trace", str(tmp_path / "trace.json")])
    found = lines.read(tmp_path / "lines.jsonl")
    assert {line["variant"] for line in found} == set(offloading.VARIANTS)
    assert (tmp_path / "trace.json").stat().st_size > 0
