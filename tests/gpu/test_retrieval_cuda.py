"""Retrieval from page-locked host memory: the same tokens as on a CPU, and nothing of the K,V on the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from policies import ExactTopK, InfiniGen, Offload, Quest
from policies.base import Policy
from runahead.config import GenerationOptions
from runahead.conversation import Conversation
from runahead.host_layer import HostLayer
from runahead.host_memory import host_empty, on_device
from runahead.rank_policies import RankPolicies
from runahead.retrieval import Retrieval
from tests.gpu.models import model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)
POLICIES: dict[str, Policy] = {
    "infinigen": InfiniGen(min_tokens=0, first_ahead=1, fetch=64, first_layer=1),
    "infinigen, alpha": InfiniGen(min_tokens=0, first_ahead=1, alpha=2.0, max_fetch=0.5, first_layer=1),
    "infinigen, all": InfiniGen(min_tokens=0, first_ahead=1, alpha=math.inf, max_fetch=1.0, first_layer=1),
    "infinigen, full pool": InfiniGen(
        min_tokens=0, first_ahead=1, fetch=64, first_layer=1, pool={"bytes": 400 * 5 * 2 * 2 * 64 * 4}
    ),
    "quest": Quest(min_tokens=0, fetch=64),
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
@pytest.mark.parametrize("lengths", [(700,), (700, 420)], ids=["alone", "padded"])
def test_a_gpu_says_what_the_cpu_says(name: str, lengths: tuple[int, ...]) -> None:
    draw, longest = torch.Generator().manual_seed(2), max(lengths)
    ids_BC = torch.randint(211, (len(lengths), longest), generator=draw)
    pads = [longest - length for length in lengths]
    said = []
    for device in (torch.device("cpu"), CUDA):
        conversation = Conversation(model(device), RankPolicies.everywhere([POLICIES[name]]))
        conversation.feed(ids_BC, pads=pads)
        decoded = conversation.generate(GenerationOptions(max_new_tokens=40, ignore_eos=True))
        conversation.feed(torch.tensor([[5, 6, 7]]))
        decoded_more = conversation.generate(GenerationOptions(max_new_tokens=5, ignore_eos=True))
        said.append([row.new_ids for row in (*decoded.rows, *decoded_more.rows)])
        if device.type == "cuda":
            assert conversation.cache is not None
            assert all(isinstance(layer, HostLayer) for layer in conversation.cache.layers)
            assert all(layer.slab_TBKX.is_pinned() for layer in conversation.cache.layers)
    assert said[0] == said[1]


def test_a_fixed_number_needs_no_look_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing, fetching and storing never wait for the device."""
    conversation = Conversation(model(CUDA), RankPolicies.everywhere([POLICIES["infinigen"]]))
    conversation.feed(torch.randint(211, (1, 600)))
    conversation.follow(torch.tensor([[1, 2, 3]]))  # tables and buffers are made
    called, originals = [], {name: getattr(Retrieval, name) for name in ("look_ahead", "fetched", "store_token")}
    for name in originals:

        def strictly(self: Retrieval, *args: Any, does: Any = originals[name], name: str = name) -> Any:
            called.append(name)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return does(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Retrieval, name, strictly)
    conversation.follow(torch.tensor([[4]]))
    assert originals.keys() == set(called)
