"""Ranges of a profile: names of layers, chunks, decoding steps and policies, and nothing at all without one."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from launch.inputs.options import RunOptions
from launch.server.options import ServeRun
from policies.exact_topk import ExactTopK
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions, Model, Ranks
from runahead.attention.base import ForwardEndsHere
from runahead.cache.attention import CausalAttention
from runahead.cache.fixed import in_fixed_shape
from runahead.config import Device, Exchange, Profile, RanksOptions, Transfer
from runahead.decoding.forward import FixedForward, forward_over
from runahead.kv_transfer.copy import CopyTransfer
from runahead.kv_transfer.schedule import Message
from runahead.thinning.rank_policies import RankPolicies
from runahead.timeline.ranges import Ranges, TorchRanges, ranges_for
from runahead.timeline.recording import LOG_LEVEL, ProfilerRecording, recorded
from runahead.timeline.trace import TraceSpan, trace_json
from tests.families import PRODUCTS, build, prompt
from tests.virtual.device import Job
from tests.virtual.jobs import chain, exchange

CPU = torch.device("cpu")
OUTER = {"chunk of tokens 0-40": 1, "decoding step": 2}
"""Ranges of a prompt and three tokens, around those of layers."""


class Nvtx:
    """torch.cuda.nvtx as far as it is used: the ranges that each thread has open, and those that it has ended."""

    def __init__(self) -> None:
        self.opened: dict[int, list[str]] = {}
        self.ended: list[str] = []

    def push(self, name: str) -> None:
        self.opened.setdefault(threading.get_ident(), []).append(name)

    def pop(self) -> None:
        opened = self.opened[threading.get_ident()]
        self.ended.append(" > ".join(opened))
        opened.pop()

    @property
    def is_balanced(self) -> bool:
        return not any(self.opened.values())


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvtx]:
    fake = Nvtx()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", fake.push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", fake.pop)
    yield fake
    assert fake.is_balanced, fake.opened


def model_with(profile: Profile) -> Model:
    model = Model(build("llama"))
    model.name_ranges(ranges_for(profile))
    return model


def generate(model: Model, policies: RankPolicies | None = None, *, record: bool = False, num_new: int = 3):
    engine = Engine(model, Ranks.start(RanksOptions(device=Device.cpu)), policies=policies)
    options = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
    return engine.generate([prompt(40)], options, record_timeline=record)


def test_without_a_profile_layers_and_steps_are_called_as_they_are() -> None:
    """It costs nothing in a layer or a step: no hook, no wrapper, and one context manager for all of them."""
    model = model_with(Profile.none)
    layers = model._layers
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    cache = model.empty_cache(50)
    model.forward(torch.tensor([prompt(40)]), CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
    fixed = in_fixed_shape(cache, pads=[0], num_tokens=40)
    assert fixed is not None
    assert type(forward_over(model, fixed, [], pads=[0], prompt_tokens=40)) is FixedForward
    ranges = Ranges()
    assert ranges("layer", 1) is ranges("policy", "snapkv") and not isinstance(ranges.recording(CPU), Iterator)


def test_messages_have_no_names_without_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(message: Message) -> str:
        raise AssertionError("a name is made that nobody reads")

    monkeypatch.setattr(Message, "__str__", named)
    for transfer in Transfer:
        Job(3).run(chain(3, transfer))
        Job(3, hosts=(0, 0, 0)).run(chain(3, transfer, carrier=CopyTransfer))
    for way in Exchange:
        Job(3).run(exchange(3, way))


def test_ranges_are_nested_as_the_work_is(nvtx: Nvtx) -> None:
    generate(model_with(Profile.nvtx))
    of_layers = {f"{outer} > layer {n}": num for outer, num in OUTER.items() for n in range(3)}
    assert Counter(nvtx.ended) == OUTER | of_layers


@pytest.mark.parametrize(
    ("policy", "in_prefill", "in_steps"),
    [
        (SnapKV(budget=36), True, False),
        (ExactTopK(fetch=20, min_tokens=0, sinks=2, recent=2, first_layer=0), True, True),
    ],
    ids=["one that drops", "one that retrieves"],
)
def test_policies_are_ranges_of_the_layers_that_they_work_in(
    nvtx: Nvtx, policy, in_prefill: bool, in_steps: bool
) -> None:
    generate(model_with(Profile.nvtx), RankPolicies(last=[policy]))
    name = f"policy {policy.label}"
    of_policy = [each for each in nvtx.ended if each.endswith(name)]
    for layer in range(3):
        assert any(each.startswith(f"chunk of tokens 0-40 > layer {layer} > ") for each in of_policy) == in_prefill
        assert any(each.startswith("decoding step") and f"layer {layer} >" in each for each in of_policy) == in_steps


def test_a_forward_that_ends_early_ends_its_ranges(nvtx: Nvtx) -> None:
    model = model_with(Profile.nvtx)
    attention = CausalAttention(model.empty_cache(2), start=0, pads=[0], ends=(1, "saved"))
    with suppress(ForwardEndsHere):
        model.forward(torch.tensor([[5, 6]]), attention, start=0, pads=[0])
    assert nvtx.ended == ["layer 0", "layer 1"]


def test_each_thread_has_ranges_of_its_own(nvtx: Nvtx) -> None:
    ranges, inside, leave = ranges_for(Profile.nvtx), threading.Event(), threading.Event()

    def work() -> None:
        with ranges("message", 7):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=work)
    with ranges("layer", 0):
        thread.start()
        inside.wait()
    leave.set()
    thread.join()
    assert nvtx.ended == ["layer 0", "message 7"]


def test_nvtx_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ValueError, match=r"profile=nvtx needs a PyTorch with CUDA.*use profile=torch"):
        ranges_for(Profile.nvtx)


def test_a_recording_has_operators_inside_the_ranges_of_layers() -> None:
    model = model_with(Profile.torch)
    [recording] = generate(model, record=True).recordings
    events = recording.events()
    layers = [each for each in events if each["name"] == "layer 2"]
    assert len(layers) == 3  # the prompt, and two steps
    for layer in layers:
        begin, end = layer["ts"], layer["ts"] + layer["dur"]
        inside = {each["name"] for each in events if begin <= each["ts"] and each["ts"] + each["dur"] <= end}
        assert PRODUCTS & inside
    assert sum(each["name"] == "decoding step" for each in events) == 2
    assert generate(model).recordings == []


def test_a_recording_is_on_the_clock_of_the_process_and_has_all_threads() -> None:
    ranges = TorchRanges()

    def work(name: str) -> None:
        with ranges(name):
            torch.ones(3).sum()

    moments = []
    with recorded(CPU) as recording:
        for number in range(3):
            thread = threading.Thread(target=work, args=(f"work {number}",))
            before_s = time.perf_counter()
            thread.start()
            thread.join()
            moments.append((before_s, time.perf_counter()))
    found = {each["name"]: each for each in recording.shifted(100.0).events()}
    for number, (before_s, after_s) in enumerate(moments):
        event = found[f"work {number}"]
        # Within the shortest of the anchors, some microseconds; a clock that is off by more shows other orders.
        assert before_s - 1e-3 <= event["ts"] / 1e6 - 100.0
        assert (event["ts"] + event["dur"]) / 1e6 - 100.0 <= after_s + 1e-3


@pytest.mark.parametrize("level", [None, "0"])
def test_a_recording_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch, level: str | None) -> None:
    monkeypatch.delenv(LOG_LEVEL, raising=False)
    if level is not None:
        monkeypatch.setenv(LOG_LEVEL, level)
    with recorded(CPU):
        assert os.environ[LOG_LEVEL] == level or level is None
    assert os.environ.get(LOG_LEVEL) == level


def packed(events: list[dict]) -> ProfilerRecording:
    import zlib

    return ProfilerRecording(packed=zlib.compress(json.dumps(events).encode()))


def event(cat: str, name: str, at: tuple[int, int], ts: float, **more) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": at[0], "tid": at[1], "ts": ts, "dur": 5.0} | more


def test_kernels_stand_below_the_spans_of_their_rank() -> None:
    """torch's profiler writes a process per GPU with its streams, and arrows from launches to kernels."""
    host, stream = (4711, 4711), (0, 7)
    of_rank = [
        event("cpu_op", "aten::mm", host, 10.0),
        event("cuda_runtime", "cudaLaunchKernel", host, 11.0),
        event("kernel", "gemm", stream, 30.0),
        event("gpu_user_annotation", "layer 0", stream, 30.0),
        event("ac2g", "ac2g", host, 11.0, ph="s", id=3),
        event("ac2g", "ac2g", stream, 30.0, ph="f", id=3, bp="e"),
    ]
    spans = [TraceSpan(kind="compute", layer=0, start_s=0.0, end_s=50e-6)]
    text = trace_json([spans, spans], recordings=[packed(of_rank), packed(of_rank).shifted(-20e-6)])
    events = json.loads(text)["traceEvents"]
    lanes = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    shown = ["compute", "wait", "send", "GPU stream 7", "host thread 4711 (main)"]
    assert [lanes[1, tid] for tid in range(5)] == shown
    kernels = [each for each in events if each["name"] == "gemm"]
    assert [lanes[each["pid"], each["tid"]] for each in kernels] == ["GPU stream 7"] * 2
    # The second rank's first event is 10 us before the prompt, where the trace begins then.
    assert [each["ts"] for each in kernels] == [40.0, 20.0]
    assert [each["ts"] for each in events if each["ph"] == "X" and each["cat"] == "compute"] == [10.0, 10.0]
    arrows = [each["id"] for each in events if each.get("cat") == "ac2g"]
    assert arrows[0] == arrows[1] != arrows[2] == arrows[3]


def test_what_goes_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="add timeline=<json>, or use profile=nvtx"):
        RunOptions(policy={"name": "full"}, profile=Profile.torch)
    with pytest.raises(ValueError, match="only launch/infer.py writes"):
        ServeRun(policy={"name": "full"}, profile=Profile.torch)
