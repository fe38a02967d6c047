"""No host waits for its GPU behind another rank's message, but where that rank is watched.

A rank that is stopped would else never be found, and this rank would count as silent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.streaming_heads import StreamingHeads
from runahead.config import GenerationOptions, PrefillOptions, Transfer
from runahead.context import ContextPartition
from runahead.engine import Engine
from runahead.kv_transfer.copy import CopyTransfer
from runahead.kv_transfer.nccl import NcclTransfer
from runahead.prefill.kv_runahead import KVRunahead
from runahead.reuse.reused_kv import ReusedKV, ReusedPart
from runahead.serving.executor import Executor
from runahead.serving.items import Inbox, PrefillItem, Tokens
from runahead.serving.limits import QueueLimits
from runahead.thinning.rank_policies import RankPolicies
from runahead.timeline import clock
from runahead.timeline.clock import CudaClock
from tests.policies import test_matrix, test_retrieval
from tests.virtual import device, test_sharded
from tests.virtual.deferred import Deferred
from tests.virtual.device import Choose, Job, Unwatched, VirtualRanks, copies_late, transfers_early, transfers_late
from tests.virtual.jobs import chain, prefill, settled, tiny_llama
from tests.virtual.machine import Budget
from tests.virtual.mapped import VirtualMemory


class AsksBehindAMessage(NcclTransfer):
    """Asks the GPU for a value in each layer, as some policies do."""

    def close(self, layer: int) -> None:
        self._gpu.current_stream().synchronize()
        super().close(layer)


def test_a_wait_behind_a_message_is_found() -> None:
    Job(1).run(chain(1, Transfer.relay, carrier=AsksBehindAMessage))
    with pytest.raises(Unwatched, match="rank 1, stream"):
        Job(2, choose=transfers_late).run(chain(2, Transfer.relay, carrier=AsksBehindAMessage))


class TakesTheTime(NcclTransfer):
    """Between two layers it takes the time of something else, as a server does for a short prompt inside a long one."""

    def open(self, layer: int) -> None:
        super().open(layer)
        with self._gpu.on(self._gpu.stream("another prompt")):  # which waits for no message
            other = CudaClock(self._gpu)
            assert other.seconds(other.mark()) > 0


@pytest.mark.parametrize("transfer", list(Transfer))
def test_a_clock_waits_for_no_message(transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "Event", device.Event)
    # Without queues that streams share, as in test_copies.py.
    Job(3, choose=transfers_late, budget=Budget(queues=64)).run(chain(3, transfer, carrier=TakesTheTime))


@pytest.mark.parametrize("transfer", list(Transfer))
def test_memory_of_shorter_prompts_is_unmapped_behind_no_message(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmapped: list[int] = []
    close = VirtualMemory._close

    def noted(memory: VirtualMemory, opened: Tensor) -> None:
        close(memory, opened)
        unmapped.append(memory.rank)

    monkeypatch.setattr(VirtualMemory, "_close", noted)
    body = chain(3, transfer, num_layers=6, carrier=CopyTransfer, prompts=4, grows=True)
    Job(3, choose=copies_late, hosts=[0] * 3, budget=Budget(queues=64)).run(body)
    assert 1 in unmapped  # which sends to the last rank, whose memory is free after each prompt


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("choose", [transfers_early, transfers_late])
def test_rows_of_a_server_are_decoded_inside_a_prefill_behind_no_message(transfer: Transfer, choose: Choose) -> None:
    """The last of three stages decodes them after each layer, and computes a short prompt there."""
    tokens = list[int]()

    def body(ranks: VirtualRanks) -> None:
        reports, inbox, model = list[Any](), Inbox(), tiny_llama(ranks.rank, 3)
        engine = Engine(model, ranks, prefill=PrefillOptions(transfer=transfer))
        executor = Executor(engine, inbox, reports.append, QueueLimits(itl_s=1e-9))
        engine._strategy.connect(ranks, ContextPartition(boundaries=(0, 5, 11, 16)), engine.prefill_options)
        with Deferred(ranks.accelerator):
            executor.carry_out(request(0, (0, 0, 0, 9)))
            if ranks.rank == 2:
                inbox.put(request(2, (0, 0, 0, 5), is_short=True))
            executor.carry_out(request(1, (0, 5, 11, 16)))
        told = [each.tokens for each in reports if isinstance(each, Tokens)]
        tokens.extend(number for each in told for number, _ in each)

    Job(3, choose=choose).run(body)
    assert tokens[0] == 0 and tokens[-1] == 1, "the first token of each long prompt"
    assert set(tokens[1:-1]) == {0, 2} and len(tokens) > 4, "between them steps, and the short prompt"


def request(number: int, boundaries: tuple[int, ...], *, is_short: bool = False) -> PrefillItem:
    ids = torch.randint(61, (boundaries[-1],), generator=torch.Generator().manual_seed(number)).tolist()
    options = [GenerationOptions(max_new_tokens=50, ignore_eos=True)]
    return PrefillItem(
        number=number, prompts=[ids], options=options, boundaries=boundaries, is_short=is_short, record_timeline=False
    )


DROPPING = [name for name in test_matrix.KEEPING if name != "kvzap"]  # which a chain refuses
POLICIES = {name: partial(test_matrix.policy, name) for name in DROPPING}
POLICIES |= {name: partial(test_retrieval.policy, name, test_retrieval.SOME[name]) for name in test_retrieval.NAMES}
ASKING = ["adakv", "cake", "duo_attention", "fastgen", "infinigen", "kvzip", "razor_attention", "shadowkv", "zigzagkv"]
"""Policies for which the host waits for the device in a prompt."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ASKING else pytest.mark.slow) for name in POLICIES]
)
def test_policies_of_a_chain_ask_their_gpu_behind_no_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.cache.kept.require_pads", lambda *_: None)  # a check that only a CPU makes
    for rank in range(3):
        settled(tiny_llama(rank, 3))
    assert (waits_in_a_prompt(name) > 0) == (name in ASKING)


def waits_in_a_prompt(name: str) -> int:
    policy = POLICIES[name]()
    outcome = prefill(KVRunahead(), (0, 14, 27, 40), PrefillOptions(), policies=[policy], choose=transfers_late)
    return outcome.synchronizations


def test_a_model_is_asked_about_itself_once_behind_no_message() -> None:
    """By the first prompt of a policy that needs to know how keys are rotated."""
    tiny_llama.cache_clear()
    first, second = (waits_in_a_prompt("squeezed_attention") for _ in range(2))
    assert first > second == 0


def test_heads_of_a_sharded_answer_are_cut_back_behind_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank asks how many tokens its heads keep, behind the exchange of the layer."""
    monkeypatch.setattr("runahead.cache.kept.require_pads", lambda *_: None)
    policy = test_matrix.policy("razor_attention", budget=8)
    assert isinstance(policy, StreamingHeads)
    policy.evict_every = 1

    def waits(policies: RankPolicies) -> dict[int, int]:
        """Waits of the host of each rank, after its last token."""
        found = dict[int, int]()

        def note(rank: int, device: Deferred) -> None:
            found[rank] = device.num_synchronizations

        test_sharded.answers((0, 7, 11, 16), transfers_late, policies, on_step=note)
        return found

    thinned, whole = waits(RankPolicies.everywhere([policy])), waits(RankPolicies())
    assert all(thinned[rank] > whole[rank] for rank in range(3)), (thinned, whole)


@pytest.mark.parametrize("transfer", list(Transfer))
def test_no_host_waits_to_attend_to_reused_segments(transfer: Transfer) -> None:
    """The queries are of two rows that are not neighbours."""
    kv_TKX = torch.randn(5, 2, 16, dtype=torch.float64)
    parts = [ReusedPart(layers_TKX=[kv_TKX] * 3, positions_T=torch.arange(5), rows=(0, 2))]
    reused = ReusedKV(parts=parts, positions_BS=torch.arange(5, 21).expand(3, -1), ends=[21] * 3)
    options = PrefillOptions(transfer=transfer)
    outcome = prefill(KVRunahead(), (0, 7, 11, 16), options, rows=3, reused=reused, choose=transfers_late)
    assert outcome.synchronizations == 0
