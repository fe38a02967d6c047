"""The store of segments: what goes when there is no room, what is never found, and what several processes share."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from policies.prompt_cache import PromptCache, Schema
from policies.reuse import ReusingPrompt, Segment, SegmentUse
from runahead import Model
from runahead.reuse.reuse import encode_segment
from runahead.reuse.store import SegmentStore, StoreLimits
from runahead.reuse.tiers.entry import Tier
from tests.examples import examples
from tests.families import build, largest_difference, throughout
from tests.prompt_cache.serving import chatting, random_ids, serve, written_out_logits
from tests.ranks.tasks import tiny_model

TOKENS = 16
BYTES = TOKENS * 3 * 2 * (8 + 8) * 8  # tokens, layers, kv heads, key and value dims, float64
FILE = BYTES + 4096  # and what describes it


def segment(name: str, *, start: int = 0, pinned: bool = False) -> Segment:
    """A text of its own for every name."""
    return Segment(
        name=name,
        ids=random_ids(TOKENS, random.Random(name)),
        positions=tuple(range(start, start + TOKENS)),
        pinned=pinned,
    )


def kv_of(each: Segment) -> list[Tensor]:
    model = tiny_model("llama")
    with throughout(model.dtype):
        return encode_segment(model, each)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def filled(store: SegmentStore, *segments: Segment) -> SegmentStore:
    for each in segments:
        store.put(each, kv_of(each))
        store.wait_for_copies()
    return store


def limits(*, host: float = 0, disk: float = 0) -> StoreLimits:
    """In segments."""
    return StoreLimits(host_bytes=int(host * BYTES), disk_bytes=int(disk * FILE))


def tiers(store: SegmentStore, *segments: Segment) -> str:
    """Where each would be found: h, d or a dash, without changing anything."""
    told = ""
    for each in segments:
        entry = store._entry(each)
        told += "-" if entry is None else entry.tier.value[0]
    return told


def test_what_was_used_longest_ago_goes_first() -> None:
    a, b, c = map(segment, "abc")
    store = filled(SegmentStore(tiny_model("llama"), limits=limits(host=2)), a, b)
    assert store.find(a) is not None
    filled(store, c)
    assert tiers(store, a, b, c) == "h-h"
    assert store.bytes_by_tier() == {"host": 2 * BYTES} == {"host": sum(layer.nbytes for layer in kv_of(a)) * 2}


def test_pinned_segments_stay(tmp_path: Path) -> None:
    a, b, c = segment("a", pinned=True), segment("b"), segment("c")
    store = filled(SegmentStore(tiny_model("llama"), tmp_path, limits(host=1, disk=2)), a, b, c)
    assert tiers(store, a, b, c) == "h-d"
    assert SegmentStore(tiny_model("llama"), tmp_path).find(a) is not None


def test_what_memory_pushes_out_is_on_disk_and_comes_back_the_same(tmp_path: Path) -> None:
    a, b = segment("a"), segment("b")
    store = filled(SegmentStore(tiny_model("llama"), tmp_path, limits(host=1, disk=9)), a, b)
    assert tiers(store, a, b) == "dh"
    found = store.find(a)
    assert found is not None and found.tier is Tier.disk and same(found.layers_TKX, kv_of(a)) and not found.is_mapped
    assert tiers(store, a, b) == "hd"
    again = store.find(a)
    assert again is not None and again.tier is Tier.host and same(again.layers_TKX, kv_of(a))


def test_both_dialects_of_a_schema_are_kept_in_the_same_bytes(tmp_path: Path) -> None:
    theirs = (
        '<schema name="s">to <module name="trip">for <parameter name="who" length="2"/><union scaffold="b">'
        '<module name="a">sea</module><module name="b">hills</module></union></module></schema>'
    )
    ours = theirs.replace("parameter", "param").replace("length", "len").replace(' scaffold="b"', "")
    ours = ours.replace("</schema>", '<scaffold modules="trip b"/></schema>')
    model = Model(build("llama", vocab_size=400), name="llama")
    for name, schema in (("theirs", theirs), ("ours", ours)):
        segments = PromptCache(Schema.from_xml(schema), chatting("{{ messages[0]['content'] }}")).segments
        store = SegmentStore(model, tmp_path / name, StoreLimits(disk_bytes=10**7))
        for each in segments:
            with throughout(model.dtype):
                store.put(each, encode_segment(model, each))
        store.wait_for_copies()
    files = sorted(path.name for path in (tmp_path / "theirs").glob("*.safetensors"))
    assert len(files) == 5 and files == sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    for name in files:
        one, other = (tmp_path / folder / name for folder in ("theirs", "ours"))
        assert one.stat().st_size == other.stat().st_size
        tensors = load_file(other)
        for key, tensor in load_file(one).items():
            torch.testing.assert_close(tensor, tensors[key], rtol=0, atol=1e-12)


def test_without_room_in_memory_files_are_read_where_they_lie(tmp_path: Path) -> None:
    a = segment("a")
    store = filled(SegmentStore(tiny_model("llama"), tmp_path, limits(host=0.5, disk=1)), a)
    found = store.find(a)
    assert found is not None and found.tier is Tier.disk and same(found.layers_TKX, kv_of(a)) and found.is_mapped
    assert store.bytes_by_tier()["host"] == 0 < store.bytes_by_tier()["disk"] <= FILE


def test_the_disk_keeps_what_processes_used_last(tmp_path: Path) -> None:
    a, b, c = map(segment, "abc")
    first = filled(SegmentStore(tiny_model("llama"), tmp_path, limits(disk=2)), a, b)
    for age, each in ((300, a), (200, b)):
        past = os.stat(tmp_path).st_mtime - age
        os.utime(tmp_path / f"{first.key(each)}.safetensors", (past, past))
    second = SegmentStore(tiny_model("llama"), tmp_path, limits(disk=2))
    mapped = first.find(b)
    assert second.find(a) is not None and mapped is not None
    past = os.stat(tmp_path).st_mtime - 100
    os.utime(tmp_path / f"{first.key(b)}.safetensors", (past, past))
    filled(second, c)
    assert tiers(first, a, b, c) == "d-d"
    assert same(mapped.layers_TKX, kv_of(b))  # a file that is in use is gone only once it is not


def test_clusters_never_push_out_the_segment_that_they_are_of(tmp_path: Path) -> None:
    """Neither its file nor its memory, but a segment that was used later. If the two lack room the clusters go."""
    a, b = segment("a"), segment("b")
    clusters = [torch.randint(9, (TOKENS, 2, 1)).int() for _ in range(3)]
    size = filled(SegmentStore(tiny_model("llama"), tmp_path / "size"), a).bytes_by_tier()["disk"]
    roomy = StoreLimits(host_bytes=0, disk_bytes=2 * size + 100)
    store = filled(SegmentStore(tiny_model("llama"), tmp_path / "two", roomy), a, b)
    store.put(a, clusters, "clusters")
    store.wait_for_copies()
    assert tiers(store, a, b) == "d-"
    found = store.find(a, "clusters")
    assert found is not None and same(found.layers_TKX, clusters)
    tight = StoreLimits(host_bytes=BYTES + 100, disk_bytes=size + 100)
    for folder in ("one", None):
        store = SegmentStore(tiny_model("llama"), folder and tmp_path / folder, tight)
        store.put(a, kv_of(a))
        store.put(a, clusters, "clusters")
        store.wait_for_copies()
        assert tiers(store, a) == "h" and store.find(a, "clusters") is None
    assert tiers(SegmentStore(tiny_model("llama"), tmp_path / "one", limits(disk=1)), a) == "d"


def test_a_segment_without_any_room_is_served_all_the_same() -> None:
    model, a = tiny_model("llama"), segment("a")
    asked = using(a)
    store = SegmentStore(model, limits=limits())
    served = serve(model, [asked], store=store)
    assert served is not None and a not in store
    assert largest_difference(served.logits[0][0], written_out_logits(model, asked)) < 1e-9


def using(*segments: Segment) -> ReusingPrompt:
    """A prompt of these segments and three tokens."""
    uses = tuple(SegmentUse(segment=each, parts=(range(len(each.ids)),)) for each in segments)
    return ReusingPrompt(uses=uses, new_ids=(5, 9, 13), new_positions=(100, 101, 102))


def test_other_text_other_positions_and_other_models_are_never_found(tmp_path: Path) -> None:
    a = segment("a")
    store = filled(SegmentStore(tiny_model("llama"), tmp_path), a)
    changed = Segment(name="a", ids=(*a.ids[:-1], a.ids[-1] - 1), positions=a.positions)
    moved = segment("a", start=1)
    holed = Segment(name="a", ids=a.ids, positions=a.positions, placeholders=(range(3, 5),))
    sunk = Segment(name="a", ids=a.ids[1:], positions=a.positions[1:], context_ids=a.ids[:1], context_positions=(0,))
    assert tiers(store, a, changed, moved, holed, sunk) == "h----"
    assert store.find(Segment(name="another name", ids=a.ids, positions=a.positions)) is not None

    other = build("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.add_(1e-3)
    others = {
        "weights": Model(other, name="llama"),
        "rope": Model(build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}), name="llama"),
        "norm": Model(build("llama", rms_norm_eps=1e-3), name="llama"),
        "dtype": Model(build("llama", dtype=torch.float32), name="llama"),
    }
    for what, model in others.items():
        assert a not in SegmentStore(model, tmp_path), what
    assert a in SegmentStore(Model(build("llama"), name="the same weights"), tmp_path)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="policy.host_bytes=-1 must not be negative"):
        StoreLimits(host_bytes=-1)


CHOICES = [segment("a", start=0), segment("b", start=30), segment("c", start=60)]


@examples(15)
@given(
    requests=st.lists(st.sets(st.sampled_from([0, 1, 2]), max_size=3), min_size=1, max_size=6),
    host=st.sampled_from([0, 1, 2]),
    disk=st.sampled_from([0, 1, 3]),
)
def test_no_sequence_of_requests_sees_what_it_did_not_ask_for(
    tmp_path_factory: pytest.TempPathFactory, requests: list[set[int]], host: int, disk: int
) -> None:
    model = tiny_model("llama")
    folder = tmp_path_factory.mktemp("store") if disk else None
    store = SegmentStore(model, folder, limits(host=host, disk=disk))
    for request in requests:
        asked = using(*(CHOICES[index] for index in sorted(request)))
        served = serve(model, [asked], store=store)
        assert served is not None
        assert largest_difference(served.logits[0][0], written_out_logits(model, asked)) < 1e-9
        used = store.bytes_by_tier()
        assert used["host"] <= store.limits.host_bytes and used.get("disk", 0) <= store.limits.disk_bytes
