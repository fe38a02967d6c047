"""A prefill on virtual GPUs gives one process's logits, keys and values, however early or late its transfers are."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from policies.snapkv import SnapKV
from policies.streaming_heads import EverySecondHead
from runahead.cache.attention import LayerCall
from runahead.config import Attention, Carrier, Exchange, PrefillOptions, Transfer
from runahead.kv_transfer.nccl import NcclTransfer
from runahead.prefill import Prefill
from runahead.prefill.chain_policies import ChainPolicies
from runahead.prefill.chain_run import ChainRun
from runahead.prefill.kv_runahead import KVRunahead
from runahead.prefill.tsp import TSP
from runahead.prefill.zigzag import Zigzag
from tests.virtual.device import Choose, Job, Race, at_random, transfers_early, transfers_late
from tests.virtual.jobs import pipeline, prefill

NUM_TOKENS = 16
ORDERS = {"early": transfers_early, "late": transfers_late, "random": at_random(7)}
CASES = {
    "relay": (KVRunahead(), (0, 7, 11, 16), PrefillOptions(transfer=Transfer.relay)),
    "relay, four ranks, one idle": (KVRunahead(), (0, 6, 6, 11, 16), PrefillOptions(transfer=Transfer.relay)),
    "direct": (KVRunahead(), (0, 7, 11, 16), PrefillOptions(transfer=Transfer.direct)),
    "tsp": (TSP(), (0, 8, 16), PrefillOptions()),
    "zigzag, ring": (Zigzag(), (0, 3, 6, 8, 11, 13, 16), PrefillOptions(exchange=Exchange.ring)),
    "zigzag, all at once": (Zigzag(), (0, 3, 6, 8, 11, 13, 16), PrefillOptions(exchange=Exchange.all_gather)),
}


@lru_cache
def alone() -> list[torch.Tensor]:
    return prefill(KVRunahead(), (0, NUM_TOKENS), PrefillOptions()).values


@pytest.mark.parametrize("case", CASES)
def test_values_do_not_depend_on_when_messages_arrive(case: str) -> None:
    strategy, boundaries, options = CASES[case]
    results = [values(strategy, boundaries, options, choose) for choose in ORDERS.values()]
    for result in results:
        assert all(torch.equal(mine, first) for mine, first in zip(result, results[0], strict=True))
        # Float64: parts of attention are merged, so the last bits may differ from one call's.
        assert all(torch.allclose(mine, one, rtol=0, atol=1e-12) for mine, one in zip(result, alone(), strict=True))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("transfer", list(Transfer))
def test_records_are_written_before_they_leave_and_read_once_they_are_there(transfer: Transfer, bits: int) -> None:
    """Over NCCL and by copies, and never in a slab that is still in use: the values are the same."""
    found = [
        prefill(
            KVRunahead(),
            (0, 7, 11, 16),
            PrefillOptions(transfer=transfer, carrier=carrier, wire_bits=bits),
            choose=choose,
            hosts=(0, 0, 0),
        ).values
        for choose in ORDERS.values()
        for carrier in (Carrier.backend, Carrier.copy)
    ]
    for result in found:
        assert all(
            torch.allclose(mine, first, rtol=0, atol=1e-12) for mine, first in zip(result, found[0], strict=True)
        )
    difference = max((mine - one).abs().max().item() for mine, one in zip(found[0], alone(), strict=True))
    assert 1e-6 < difference < 1


@pytest.mark.parametrize("transfer", list(Transfer))
def test_some_heads_of_some_tokens_arrive_before_they_are_read(transfer: Transfer) -> None:
    """Three messages of a layer, over NCCL and by copies; slabs in which they travel are used again and again."""
    policies = [EverySecondHead(sinks=1, recent=3)]

    def logits(choose: Choose, carrier: Carrier) -> torch.Tensor:
        options = PrefillOptions(transfer=transfer, carrier=carrier, attention=Attention.streaming_heads)
        found = prefill(
            KVRunahead(), (0, 7, 11, 16), options, choose=choose, policies=policies, num_layers=5, hosts=(0, 0, 0)
        )
        assert found.logits_BV is not None
        return found.logits_BV

    options = PrefillOptions(attention=Attention.streaming_heads)
    one = prefill(KVRunahead(), (0, NUM_TOKENS), options, policies=policies, num_layers=5).logits_BV
    exact = prefill(KVRunahead(), (0, NUM_TOKENS), PrefillOptions(), policies=policies, num_layers=5).logits_BV
    assert one is not None and exact is not None and (one - exact).abs().max() > 1e-6
    for choose in ORDERS.values():
        for carrier in (Carrier.backend, Carrier.copy):
            torch.testing.assert_close(logits(choose, carrier), one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_policies_have_read_a_slab_before_the_next_layer_takes_it(order: str) -> None:
    """The last rank keeps a few tokens of each layer, and receives all layers in the same few slabs."""
    strategy, boundaries, options = CASES["relay"]
    kept = [SnapKV(budget=6, window=3, kernel=3)]
    found = prefill(strategy, boundaries, options, policies=kept, num_layers=5, choose=ORDERS[order])
    alone = prefill(KVRunahead(), (0, NUM_TOKENS), PrefillOptions(), policies=kept, num_layers=5)
    for ours, theirs in zip(found.values, alone.values, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert len(found.values[1]) == 6


def test_a_slab_that_is_released_before_policies_have_read_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    closed_by_policies, close = ChainPolicies.closed, NcclTransfer.close
    closed = set[tuple[NcclTransfer, int]]()

    def released_first(self: ChainPolicies, call: LayerCall) -> None:
        assert isinstance(self._run, ChainRun)
        self._run.transfer.close(call.layer)
        closed_by_policies(self, call)

    def close_once(self: NcclTransfer, layer: int) -> None:
        if (self, layer) not in closed:
            closed.add((self, layer))
            close(self, layer)

    monkeypatch.setattr(ChainPolicies, "closed", released_first)
    monkeypatch.setattr(NcclTransfer, "close", close_once)
    with pytest.raises(Race):
        prefill(*CASES["relay"], policies=[SnapKV(budget=6, window=3, kernel=3)], num_layers=5)


def values(
    strategy: Prefill, boundaries: tuple[int, ...], options: PrefillOptions, choose: Choose
) -> list[torch.Tensor]:
    return prefill(strategy, boundaries, options, choose=choose).values


def test_a_prefix_that_is_not_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.kv_transfer.nccl.NcclTransfer.await_prefix", lambda self, layer: None)
    logits, *_ = prefill(*CASES["relay"], choose=transfers_late, watched=False).values
    assert not torch.allclose(logits, alone()[0])
    with pytest.raises(Race):
        prefill(*CASES["relay"])


@pytest.mark.parametrize("order", ORDERS)
def test_hidden_states_do_not_depend_on_when_messages_arrive(order: str) -> None:
    """A stage sends from the memory in which it has received."""
    seen: list[torch.Tensor] = []
    Job(3, choose=ORDERS[order]).run(pipeline(3, num_chunks=7, seen=seen))
    assert [x_1CD.unique().tolist() for x_1CD in seen] == [[10.0 * number + 2] for number in range(7)]


def test_hidden_states_that_are_not_waited_for_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.kv_transfer.nccl.NcclTransfer.await_prefix", lambda self, layer: None)
    with pytest.raises(Race):
        Job(3, choose=transfers_late).run(pipeline(3, num_chunks=7, seen=[]))
