"""K,V in memory of the host: what the GPU's path stores, fetches and waits for, with a CPU in the place of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from runahead.cache.host import copy_stream
from runahead.cache.host import memory as host_memory
from runahead.cache.host.copy_stream import MOVED_AT_ONCE, CopyStream
from runahead.cache.host.layer import HostLayer
from runahead.cache.host.memory import host_empty
from runahead.cache.slabs import SlotsToCopy
from runahead.ranks.accelerator import Accelerator
from tests.families import prompt, throughout
from tests.policies.test_indices import RETRIEVED_TURN, cut_before_retrieval
from tests.policies.test_retrieval import ALL, GENERATED, NAMES, NUM_TOKENS, PADDED, SOME, Turns, policy
from tests.ranks.tasks import tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class LateCopies(CopyStream):
    """Copies whose tensors are NaN until somebody waits for them, and which know who waited.

    Attributes:
        fetched: tensors and their contents, by mark.
        waited: marks that somebody waited for.
        written: number of copies since somebody waited for all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.fetched = device, list[list[tuple[Tensor, Tensor]]]()
        self._new: list[tuple[Tensor, Tensor]] = []
        self.waited: list[int] = []
        self.written = 0

    @contextmanager
    def copying(self, *read: Tensor) -> Iterator[None]:
        yield
        self.written += 1

    def hide(self, slab: Tensor) -> None:
        self._new.append((slab, slab.clone()))
        slab.fill_(torch.nan if slab.is_floating_point() else -1)

    def mark(self) -> Any:
        self.fetched.append(self._new)
        self._new = []
        return len(self.fetched) - 1

    def hold_compute(self, mark: Any = None) -> None:
        if mark is None:
            self.written = 0
        else:
            self.waited.append(mark)
            for slab, content in self.fetched[mark]:
                slab.copy_(content)

    def pace(self) -> None:
        pass

    def finish(self) -> None:
        pass


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """Late copies of every retrieval from now on, the first in front."""
    made: list[LateCopies] = []

    def copies_for(device: torch.device) -> LateCopies:
        made.append(LateCopies(device))
        return made[-1]

    fetch = HostLayer.fetch

    def late(self: HostLayer, wanted: SlotsToCopy) -> Any:
        slab_TBKX, _ = fetch(self, wanted)
        assert isinstance(self.copies, LateCopies)
        self.copies.fetched.pop()
        self.copies.hide(slab_TBKX[: len(slab_TBKX) - wanted.room])
        return slab_TBKX, self.copies.mark()

    monkeypatch.setattr("runahead.retrieval.retrieval.copies_for", copies_for)
    monkeypatch.setattr(HostLayer, "fetch", late)
    return made


def plain(name: str, options: dict[str, Any], lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> Turns:
    """The same without a pool of the host."""
    with monkeypatch.context() as patch:
        patch.setattr("runahead.retrieval.retrieval.copies_for", lambda device: None)
        turns = Turns(tiny_model("llama"), [policy(name, options)], lengths)
        turns.prefill()
    return turns


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("some", [True, False], ids=["some", "all"])
@pytest.mark.sampled(3)
def test_it_is_what_is_read_in_place_bit_by_bit(
    name: str, lengths: tuple[int, ...], some: bool, copies: list[LateCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through growth and another turn; where all is chosen too, which is one copy without indices."""
    options = (SOME if some else ALL)[name]
    ours = Turns(tiny_model("llama"), [policy(name, options)], lengths)
    ours.prefill()
    theirs = plain(name, options, lengths, monkeypatch)
    more = torch.tensor([prompt(9, seed=5)])
    for tokens in (GENERATED * 2, GENERATED):
        assert torch.equal(ours.decode(tokens), theirs.decode(tokens))
        with throughout(torch.float64):
            assert torch.equal(ours.conversation.feed(more), theirs.conversation.feed(more))
    assert sorted(copies[0].waited) == list(range(12 * sum(ours.retrieval.in_pool)))  # for each copy once


@pytest.mark.parametrize("name", ["exact_topk", "quest", "shadowkv", "retroinfer", "sparq", "magicpig", "offload"])
def test_a_turn_that_retrieves_brings_no_layer_to_the_device(
    name: str, copies: list[LateCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SOME[name] | {"turn_tokens": 9}
    ours = Turns(tiny_model("llama"), [policy(name, options)])
    ours.prefill()
    theirs = plain(name, options, (NUM_TOKENS,), monkeypatch)

    def to_device(self: HostLayer) -> Any:
        raise AssertionError("all of it is copied")

    monkeypatch.setattr(HostLayer, "to_device", to_device)
    for tokens in (RETRIEVED_TURN, RETRIEVED_TURN[:2]):
        with throughout(torch.float64):
            more = torch.tensor([tokens])
            assert torch.equal(ours.conversation.feed(more), theirs.conversation.feed(more))
        assert torch.equal(ours.decode(GENERATED), theirs.decode(GENERATED))


@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("by", ["a policy before", "a full pool"])
def test_a_turn_that_retrieves_is_cut_back_as_it_is_in_place(
    by: str, lengths: tuple[int, ...], copies: list[LateCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device. Seen to fail: policies that cut a layer back in host memory, whose slots the device knows, and an
    index of the layer as it was before."""
    steps = cut_before_retrieval("quest", page=2, first_layer=0)
    if by == "a full pool":
        size = 24 * 3 * tiny_model("llama").kv_shapes[0].bytes_per_token(len(lengths))
        steps = [policy("exact_topk", {"fetch": 12, "turn_tokens": 9, "pool": {"bytes": size}})]
    ours = Turns(tiny_model("llama"), steps, lengths)
    ours.prefill()
    with monkeypatch.context() as patch:
        patch.setattr("runahead.retrieval.retrieval.copies_for", lambda device: None)
        theirs = Turns(tiny_model("llama"), steps, lengths)
        theirs.prefill()

    def keep(self: HostLayer, *_: Any, **__: Any) -> None:
        raise AssertionError("it is cut back in host memory")

    monkeypatch.setattr(HostLayer, "keep", keep)
    for tokens in (RETRIEVED_TURN, RETRIEVED_TURN[:2]):
        with throughout(torch.float64):
            more = torch.tensor([tokens])
            assert torch.equal(ours.conversation.feed(more), theirs.conversation.feed(more))
        assert all(isinstance(layer, HostLayer) for layer in ours.conversation.cache.layers)
        assert torch.equal(ours.decode(GENERATED), theirs.decode(GENERATED))


@pytest.mark.parametrize("name", ["exact_topk", "quest"])
@pytest.mark.parametrize("late", [-1.0, 0.3, 1.0])
def test_a_late_choice_is_corrected_head_by_head(
    name: str, late: float, copies: list[LateCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit as in place; only heads that choose again are fetched again."""
    options = SOME[name] | {"late": late}
    ours = Turns(tiny_model("llama"), [policy(name, options)], PADDED)
    ours.prefill()
    theirs = plain(name, options, PADDED, monkeypatch)
    for tokens in (GENERATED, [17]):
        assert torch.equal(ours.decode(tokens), theirs.decode(tokens))
        with throughout(torch.float64):
            more = torch.tensor([RETRIEVED_TURN])
            assert torch.equal(ours.conversation.feed(more), theirs.conversation.feed(more))
    corrections = len(copies[0].fetched) - 3 * 7  # of 3 layers, after each of 5 tokens and for 2 after a turn
    assert corrections == {-1.0: 0, 0.3: corrections, 1.0: 3 * 3}[late]  # for 3 tokens that follow another


def test_layers_that_are_always_read_whole_stay_on_the_device(copies: list[LateCopies]) -> None:
    turns = Turns(tiny_model("llama"), [policy("infinigen", SOME["infinigen"])])
    turns.prefill()
    turns.decode(GENERATED)
    cache = turns.conversation.cache
    assert cache is not None
    assert [isinstance(layer, HostLayer) for layer in cache.layers] == [False, True, True]
    assert cache.retrieval.host_bytes == sum(layer.slab_TBKX.nbytes for layer in cache.layers[1:])


def test_windows_stay_on_the_device_too(copies: list[LateCopies]) -> None:
    model = tiny_model("gemma2")
    turns = Turns(model, [policy("exact_topk", SOME["exact_topk"])])
    turns.prefill()
    cache = turns.conversation.cache
    assert cache is not None
    whole = [rule is None for rule in model.rules]
    assert [isinstance(layer, HostLayer) for layer in cache.layers] == whole
    assert any(whole) and not all(whole)


def test_what_the_host_has_of_a_prompt_stays_where_it_is(copies: list[LateCopies]) -> None:
    """In another turn only the new tokens are copied, as long as there is room."""
    turns = Turns(tiny_model("llama"), [policy("infinigen", SOME["infinigen"])])
    turns.prefill()
    cache = turns.conversation.cache
    assert cache is not None
    before = cache.layers[1].slab_TBKX
    with torch.inference_mode():
        before[:NUM_TOKENS].fill_(7.0)  # nobody copies over it
    with throughout(torch.float64):
        turns.conversation.feed(torch.tensor([[5]]))
    after = cache.layers[1].slab_TBKX
    assert after.data_ptr() == before.data_ptr() and (after[:NUM_TOKENS] == 7.0).all()


@pytest.mark.parametrize("victim", ["fifo", "lru", "counter"])
@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), (NUM_TOKENS, 33)], ids=["alone", "padded"])
def test_a_full_pool_of_the_host(
    victim: str, lengths: tuple[int, ...], copies: list[LateCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are written over others in place, and no memory is taken beyond the limit."""
    limit = 43
    per_slot = 2 * tiny_model("llama").kv_shapes[0].bytes_per_token(len(lengths))
    options = {"fetch": 8, "first_layer": 1, "pool": {"bytes": limit * per_slot, "victim": victim}}
    ours = Turns(tiny_model("llama"), [policy("infinigen", options)], lengths)
    ours.prefill()
    theirs = plain("infinigen", options, lengths, monkeypatch)
    assert torch.equal(ours.decode(GENERATED * 3), theirs.decode(GENERATED * 3))
    for turns in (ours, theirs):
        cache = turns.conversation.cache
        assert cache is not None
        assert turns.retrieval.report().evicted == [0, 9, 9]
        assert cache.retrieval.host_bytes == limit * per_slot
    more = torch.tensor([prompt(3, seed=5)])  # behind which the pool is cut back anew
    with throughout(torch.float64):
        assert torch.equal(ours.conversation.feed(more), theirs.conversation.feed(more))
    assert torch.equal(ours.decode(GENERATED), theirs.decode(GENERATED))


def test_an_index_is_made_anew_of_keys_on_the_host(copies: list[LateCopies], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.retrieval.indices.DECODED_SOON", 4)
    ours = Turns(tiny_model("llama"), [policy("infinigen", SOME["infinigen"])])
    ours.prefill()
    theirs = plain("infinigen", SOME["infinigen"], (NUM_TOKENS,), monkeypatch)
    assert torch.equal(ours.decode(GENERATED * 2), theirs.decode(GENERATED * 2))
    found = ours.retrieval.layers[1]
    assert found is not None and 0 < found.age < 2 * len(GENERATED)


class Recorder:
    """In the place of CUDA's streams and events."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Recorder) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Recorder) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Recorder:
        mark = Recorder(f"mark {sum(entry.startswith('mark') for entry in self.log) + 1}", self.log)
        self.log.append(f"{mark.name} of {self.name}")
        return mark

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []

    @contextmanager
    def stream(stream: Recorder) -> Iterator[None]:
        log.append(f"into {stream.name}")
        yield
        log.append("back")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Recorder("copies", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorder("compute", log))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return log


def test_copies_are_behind_what_was_computed_and_compute_waits_for_a_mark_alone(log: list[str]) -> None:
    copies = CopyStream(Accelerator(GPU))

    class Read:
        def record_stream(self, stream: Recorder) -> None:
            log.append(f"read in {stream.name}")

    with copies.copying(Read()):  # type: ignore[arg-type]
        log.append("copy")
    copies.hold_compute(copies.mark())
    queued = ["copies waits for compute", "into copies", "copy", "back", "read in copies"]
    assert log == [*queued, "mark 1 of copies", "compute waits for mark 1"]


def test_few_layers_are_on_their_way_at_once(log: list[str]) -> None:
    copies = CopyStream(Accelerator(GPU))
    for _ in range(MOVED_AT_ONCE):
        copies.pace()
    assert not any(entry.startswith("host waits") for entry in log)
    copies.pace()
    assert [entry for entry in log if entry.startswith("host waits")] == ["host waits for mark 1"]


class Registered:
    """In the place of the CUDA runtime, which locks pages."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.log = status, list[tuple[str, int]]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.log.append(("lock", num_bytes))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.log.append(("unlock", 0))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Registered:
    runtime = Registered()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host_memory, "_arena", host_memory._Arena())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return runtime


def test_exactly_what_is_asked_for_is_page_locked_and_kept_for_the_next(runtime: Registered) -> None:
    def freed() -> None:
        runtime.log.append(("freed", 0))

    host = host_empty((300, 7), torch.bfloat16, GPU, before_free=freed)
    assert runtime.log == [("lock", 300 * 7 * 2)]
    host.copy_(torch.arange(2100).view(300, 7))
    part = host[4:]
    del host
    assert len(runtime.log) == 1 and part[0, 0] == 28
    del part
    assert runtime.log[1:] == [("freed", 0)]
    runtime.log.clear()
    again, small = host_empty((2100,), torch.float16, GPU), host_empty((3,), torch.uint8, GPU)
    assert runtime.log == [("lock", 3)] and again.nbytes == 4200
    del small
    larger = host_empty((5,), torch.uint8, GPU)
    assert runtime.log == [("lock", 3), ("unlock", 0), ("lock", 5)] and larger.shape == (5,)
    del again
    assert host_empty((7,), torch.uint8, GPU).data_ptr() % 4096 == 0 and len(runtime.log) == 3


def test_memory_that_cannot_be_locked_is_refused_in_one_line(runtime: Registered) -> None:
    runtime.status = 2
    with pytest.raises(ValueError, match=r"^14 bytes of KV cache do not fit into page-locked .*ulimit -l\)$"):
        host_empty((7,), torch.float16, GPU)
    assert runtime.log == [("lock", 14)]


def test_nothing_is_page_locked_for_a_cpu(runtime: Registered) -> None:
    host = host_empty((3, 2), torch.float32, CPU)
    assert host_memory.on_device(host, CPU) is host and not runtime.log
    assert host_empty((0, 2), torch.float32, GPU).shape == (0, 2) and not runtime.log
    assert copy_stream.copies_for(CPU) is None
