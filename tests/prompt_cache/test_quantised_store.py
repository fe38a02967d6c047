"""Segments in 8, 4 or 2 bits in host memory and on disk: quantised once, bytes as predicted, other bits never found."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from policies.reuse import Segment
from runahead.cache.quantised.records import KVRecords
from runahead.reuse.store import SegmentStore, StoreLimits
from runahead.reuse.tiers.entry import Tier
from tests.prompt_cache.serving import serve
from tests.prompt_cache.test_store import kv_of, same, segment, using
from tests.ranks.tasks import tiny_model

TOKENS = 16
LAYERS, KV_HEADS, DIM = 3, 2, 8


def token_bytes(bits: int) -> int:
    """Codes, scale and zero point of a key and a value, in all heads and layers."""
    return LAYERS * KV_HEADS * 2 * (DIM * bits // 8 + 4)


def store_of(folder: Path | None = None, *, bits: int | None = 4, host: int = 2**20) -> SegmentStore:
    return SegmentStore(tiny_model("llama"), folder, StoreLimits(host_bytes=host), bits=bits)


def once(layers_TKX: list[Tensor], bits: int) -> list[Tensor]:
    """Keys and values that were quantised once."""
    kept = KVRecords(tiny_model("llama").kv_shapes, bits)
    return [kept.unpack(layer, kept.pack(layer, kv_TKX)) for layer, kv_TKX in enumerate(layers_TKX)]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_segment_is_quantised_once_and_counted_to_the_byte(tmp_path: Path, bits: int) -> None:
    """Wrong: a segment from disk that is quantised again for host memory; bytes and limits in the model's dtype."""
    a, b, size = segment("a"), segment("b"), TOKENS * token_bytes(bits)
    store = store_of(tmp_path, bits=bits, host=size)
    assert store.stored_token_bytes == token_bytes(bits)
    expected = once(kv_of(a), bits)
    assert not same(expected, kv_of(a))
    for each in (a, b):
        store.put(each, kv_of(each))
        assert store.bytes_by_tier()["host"] == size
    for tier in (Tier.disk, Tier.host):  # b is in host memory, until a is
        found = store.find(a)
        assert found is not None and (found.tier, found.num_bytes) == (tier, size)
        assert same(found.layers_TKX, expected) and not found.is_mapped
        assert store.bytes_by_tier()["host"] == size
    payload = sum(tensor.nbytes for tensor in load_file(tmp_path / f"{store.key(a)}.safetensors").values())
    assert payload == size
    tight = store_of(tmp_path, bits=bits, host=size - 1)
    found = tight.find(a)
    assert found is not None and found.tier is Tier.disk and same(found.layers_TKX, expected)
    assert tight.bytes_by_tier()["host"] == 0


def test_segments_of_other_bits_are_not_found_and_told_once(tmp_path: Path) -> None:
    """Wrong: a key without the bits."""
    a, b, paths = segment("a"), segment("b"), set[str]()
    for bits in (8, 4, 2, None):
        folder = tmp_path / str(bits)
        store = store_of(folder, bits=bits)
        for each in (a, b):
            store.put(each, kv_of(each))
        store.wait_for_copies()
        paths |= {path.name for path in folder.glob("*.safetensors")}
        for other in (4, 2, None):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                later = store_of(folder, bits=other)
                found = [later.find(each) for each in (a, b)]
            if other == bits:
                assert not told and None not in found
            else:
                assert found == [None, None] and a not in later
                [warning] = told
                names = ["null" if each is None else str(each) for each in (bits, other)]
                text = f"stored with tier_bits={names[0]}; with tier_bits={names[1]} they are not used"
                assert text in str(warning.message)
    assert len(paths) == 8


def test_a_prompt_attends_to_the_numbers_of_the_records(tmp_path: Path) -> None:
    """Encoded in this run, from host memory, and from a file for which memory has no room."""
    asked, as_stored = using(segment("a"), segment("b", start=30)), store_of(bits=None)
    for use in asked.uses:
        as_stored.put(use.segment, once(kv_of(use.segment), 4))
    model = tiny_model("llama")
    expected = serve(model, [asked], store=as_stored, following=[7, 8])
    store = store_of(tmp_path)
    for each in (store, store, store_of(tmp_path, host=0)):
        served = serve(model, [asked], store=each, following=[7, 8])
        assert served is not None and expected is not None
        for ours, theirs in zip(served.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert served.report.found_bytes == {"disk": 2 * TOKENS * token_bytes(4)}


def test_clusters_stay_as_they_are(tmp_path: Path) -> None:
    """They are numbers of clusters. Wrong: all that is put is packed."""
    a: Segment = segment("a")
    clusters = [torch.randint(9, (TOKENS, KV_HEADS, 1)).int() for _ in range(LAYERS)]
    store = store_of(tmp_path)
    store.put(a, kv_of(a))
    store.put(a, clusters, "clusters")
    store.wait_for_copies()
    for each in (store, store_of(tmp_path), store_of(tmp_path, host=0)):
        found = each.find(a, "clusters")
        assert found is not None and same(found.layers_TKX, clusters)
