"""Profiles of a GPU: NVTX ranges around captured and replayed steps, and kernels in the timeline."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, supported_activities

from runahead import Engine, GenerationOptions
from runahead.config import Profile
from runahead.report import GenerationBatch
from runahead.timeline.ranges import ranges_for
from runahead.timeline.trace import trace_json
from tests.gpu.models import CUDA, NUM_LAYERS, alone, model

SEES_KERNELS = ProfilerActivity.CUDA in supported_activities()
"""True if torch's profiler can record a GPU, which it cannot where PyTorch has no CUDA and the GPU is a virtual one."""

NUM_NEW = 8


def profiled(profile: Profile) -> GenerationBatch:
    loaded = model(CUDA, torch.bfloat16)
    loaded.name_ranges(ranges_for(profile))
    ids = torch.randint(211, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    options = GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)
    return Engine(loaded, alone()).generate([ids], options, record_timeline=True)


def test_nvtx_ranges_are_balanced_where_steps_are_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, ended = list[str](), Counter[str]()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", opened.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ended.update([opened.pop()]))
    profiled(Profile.nvtx)
    assert not opened
    assert ended["decoding step"] == NUM_NEW - 1
    assert ended["chunk of tokens 0-300"] == 1
    # How many steps launch layers depends on when the graph is captured.
    assert len({ended[f"layer {layer}"] for layer in range(NUM_LAYERS)}) == 1 < ended["layer 0"]


@pytest.mark.skipif(not SEES_KERNELS, reason="torch's profiler sees no virtual GPU")
def test_the_timeline_has_kernels_beside_the_layers() -> None:
    batch = profiled(Profile.torch)
    events = json.loads(trace_json(batch.spans, recordings=batch.recordings))["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    kernels = [each for each in events if each.get("cat") == "kernel"]
    assert {lanes[each["tid"]].split()[0] for each in kernels} == {"GPU"}
    layers = [each for each in events if each.get("cat") == "gpu_user_annotation" and each["name"] == "layer 1"]
    begin, end = layers[0]["ts"], layers[0]["ts"] + layers[0]["dur"]
    assert any(begin <= each["ts"] and each["ts"] + each["dur"] <= end for each in kernels)


@pytest.mark.skipif(SEES_KERNELS, reason="torch's profiler sees this GPU")
def test_a_profile_without_kernels_says_so_and_has_the_ranges() -> None:
    with pytest.warns(UserWarning, match="torch's profiler has seen no kernel of the GPU"):
        [recording] = profiled(Profile.torch).recordings
    assert {f"layer {layer}" for layer in range(NUM_LAYERS)} < {event["name"] for event in recording.events()}
