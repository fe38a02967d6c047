"""K,V come back as they were stored, lie as the network wants them, and take the bytes that were counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runahead.cache.slabs import KVShape, Slabs

# Legend: B batch, K kv heads, S tokens, H key dim, V value dim.

CPU = torch.device("cpu")

shapes = st.builds(
    KVShape,
    num_kv_heads=st.integers(1, 4),
    key_dim=st.integers(1, 9),
    value_dim=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    first = draw(st.integers(0, 20))
    return first, first + draw(st.integers(1, 20))


def one_layer(shape: KVShape, batch: int, span: tuple[int, int]) -> Slabs:
    return Slabs.empty([shape], batch=batch, spans=[span], num_slabs=1, device=CPU)


def keys_and_values(shape: KVShape, batch: int, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, shape.num_kv_heads, num_tokens, width, generator=generator).to(shape.dtype)
        for width in (shape.key_dim, shape.value_dim)
    )


class TestSlab:
    @given(shape=shapes, batch=st.integers(1, 3), span=spans(), data=st.data())
    def test_reads_what_was_written_piece_by_piece(
        self, shape: KVShape, batch: int, span: tuple[int, int], data: st.DataObject
    ) -> None:
        first, end = span
        k_BKSH, v_BKSV = keys_and_values(shape, batch, end - first)
        slab = one_layer(shape, batch, span).by_layer[0]
        cut = data.draw(st.integers(first, end))
        for start, stop in ((cut, end), (first, cut)):  # a chunk is written before its prefix arrives
            slab.write(start, k_BKSH[:, :, start - first : stop - first], v_BKSV[:, :, start - first : stop - first])
        start = data.draw(st.integers(first, end))
        stop = data.draw(st.integers(start, end))
        k, v = slab.read(start, stop)
        assert torch.equal(k, k_BKSH[:, :, start - first : stop - first])
        assert torch.equal(v, v_BKSV[:, :, start - first : stop - first])

    @given(shape=shapes, batch=st.integers(1, 3), span=spans(), data=st.data())
    def test_any_run_of_tokens_is_one_contiguous_message(
        self, shape: KVShape, batch: int, span: tuple[int, int], data: st.DataObject
    ) -> None:
        slab = one_layer(shape, batch, span).by_layer[0]
        start = data.draw(st.integers(*span))
        end = data.draw(st.integers(start, span[1]))
        message = slab.tokens(start, end)
        assert message.is_contiguous()
        assert message.nbytes == (end - start) * shape.bytes_per_token(batch)
        assert message.untyped_storage().data_ptr() == slab.slab_TBKX.untyped_storage().data_ptr()

    @given(shape=shapes, batch=st.integers(1, 3), span=spans())
    def test_message_received_in_place_is_what_attention_reads(
        self, shape: KVShape, batch: int, span: tuple[int, int]
    ) -> None:
        here, there = one_layer(shape, batch, span).by_layer[0], one_layer(shape, batch, span).by_layer[0]
        k_BKSH, v_BKSV = keys_and_values(shape, batch, span[1] - span[0])
        here.write(span[0], k_BKSH, v_BKSV)
        there.tokens(*span).copy_(here.tokens(*span))
        k, v = there.read(*span)
        assert torch.equal(k, k_BKSH)
        assert torch.equal(v, v_BKSV)

    def test_reading_copies_nothing(self) -> None:
        shape = KVShape(num_kv_heads=2, key_dim=4, value_dim=3, dtype=torch.float32)
        slab = one_layer(shape, 2, (5, 12)).by_layer[0]
        storage = slab.slab_TBKX.untyped_storage().data_ptr()
        assert [part.untyped_storage().data_ptr() for part in slab.read(6, 9)] == [storage, storage]

    @pytest.mark.parametrize(("start", "end"), [(4, 6), (11, 13), (8, 7)])
    def test_tokens_that_are_not_stored_are_an_error(self, start: int, end: int) -> None:
        shape = KVShape(num_kv_heads=1, key_dim=2, value_dim=2, dtype=torch.float32)
        with pytest.raises(AssertionError):
            one_layer(shape, 1, (5, 12)).by_layer[0].tokens(start, end)


class TestCache:
    @given(layers=st.lists(st.tuples(shapes, spans()), min_size=1, max_size=9), batch=st.integers(1, 3), data=st.data())
    def test_layers_with_a_slot_each_do_not_touch_each_other(
        self, layers: list[tuple[KVShape, tuple[int, int]]], batch: int, data: st.DataObject
    ) -> None:
        slabs = Slabs.empty(
            [shape for shape, _ in layers],
            batch=batch,
            spans=[span for _, span in layers],
            num_slabs=len(layers) + data.draw(st.integers(0, 2)),
            device=CPU,
        )
        stored = [keys_and_values(shape, batch, end - first, i) for i, (shape, (first, end)) in enumerate(layers)]
        for layer, (k, v) in enumerate(stored):
            slabs.by_layer[layer].write(layers[layer][1][0], k, v)
        for layer, (k_BKSH, v_BKSV) in enumerate(stored):
            k, v = slabs.by_layer[layer].read(*layers[layer][1])
            assert torch.equal(k, k_BKSH)
            assert torch.equal(v, v_BKSV)
        assert slabs.num_bytes == sum((end - first) * shape.bytes_per_token(batch) for shape, (first, end) in layers)

    @given(
        layers=st.lists(st.tuples(shapes, spans()), min_size=1, max_size=9),
        num_slots=st.integers(1, 4),
        batch=st.integers(1, 2),
    )
    def test_ring_holds_the_latest_layers_in_the_bytes_of_its_largest(
        self, layers: list[tuple[KVShape, tuple[int, int]]], num_slots: int, batch: int
    ) -> None:
        """Layers that share a slot may differ in shape, dtype and span."""
        slabs = Slabs.empty(
            [shape for shape, _ in layers],
            batch=batch,
            spans=[span for _, span in layers],
            num_slabs=num_slots,
            device=CPU,
        )
        stored = [keys_and_values(shape, batch, end - first, i) for i, (shape, (first, end)) in enumerate(layers)]
        for layer, (k, v) in enumerate(stored):
            slabs.by_layer[layer].write(layers[layer][1][0], k, v)
            for earlier in range(max(0, layer - num_slots + 1), layer + 1):
                read = slabs.by_layer[earlier].read(*layers[earlier][1])
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(read, stored[earlier], strict=True))
        sizes = [(end - first) * shape.bytes_per_token(batch) for shape, (first, end) in layers]
        assert slabs.num_bytes == sum(max(sizes[slot::num_slots]) for slot in range(min(num_slots, len(layers))))

    def test_layer_a_ring_behind_has_the_same_memory(self) -> None:
        shape = KVShape(num_kv_heads=2, key_dim=4, value_dim=4, dtype=torch.float32)
        slabs = Slabs.empty([shape] * 5, batch=1, spans=[(0, 8)] * 5, num_slabs=3, device=CPU)
        places = [slabs.by_layer[layer].slab_TBKX.data_ptr() for layer in range(5)]
        assert places[3:] == places[:2]
        assert len(set(places)) == 3

    def test_bytes_that_are_not_there_are_refused_in_one_line_with_their_number(self) -> None:
        shape = KVShape(num_kv_heads=1, key_dim=1 << 20, value_dim=1 << 20, dtype=torch.float32)
        spans = [(0, 1 << 28)]  # 2^51 bytes, more than a process can address
        with pytest.raises(
            ValueError, match=f"{1 << 51:,} bytes of keys and values do not fit on cpu; use a shorter prompt"
        ) as caught:
            Slabs.empty([shape], batch=1, spans=spans, num_slabs=1, device=CPU)
        assert "\n" not in str(caught.value)
