"""Hooks beside a layer's attention: in which order they are called, when a layer is closed, where a forward ends."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor

from runahead.attention.base import ForwardEndsHere
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention, End, LayerCall, LayerHook
from tests.ranks.tasks import tiny_model

IDS = torch.tensor([[5, 6, 7]])


class Noting(LayerHook):
    """Notes each call, by the name of the hook and of the method."""

    def __init__(self, name: str, calls: list[tuple[str, str, int]]) -> None:
        self._name, self._calls = name, calls

    def before_save(self, call: LayerCall) -> None:
        self._calls.append((self._name, "before_save", call.layer))

    def save(self, call: LayerCall) -> None:
        self._calls.append((self._name, "save", call.layer))

    def wait_for_load(self, call: LayerCall) -> None:
        self._calls.append((self._name, "wait_for_load", call.layer))

    def closed(self, call: LayerCall) -> None:
        self._calls.append((self._name, "closed", call.layer))

    def attended(self, call: LayerCall) -> None:
        self._calls.append((self._name, "attended", call.layer))


def noted(family: str, *names: str, ends: End | None = None) -> list[tuple[str, str, int]]:
    model, calls = tiny_model(family), list[tuple[str, str, int]]()
    hooks = [Noting(name, calls) for name in names]
    attention = CausalAttention(model.empty_cache(3), start=0, pads=[0], hooks=hooks, ends=ends)
    with suppress(ForwardEndsHere):
        model.forward(IDS, attention, start=0, pads=[0])
    return calls


def test_hooks_nest_like_brackets() -> None:
    of_layer = [("outer", "before_save"), ("inner", "before_save"), ("outer", "save"), ("inner", "save")]
    of_layer += [("outer", "wait_for_load"), ("inner", "wait_for_load")]
    of_layer += [("inner", "closed"), ("outer", "closed"), ("inner", "attended"), ("outer", "attended")]
    expected = [(*each, layer) for layer in range(3) for each in of_layer]
    assert noted("llama", "outer", "inner") == expected


@pytest.mark.parametrize("takes_blocks", [False, True])
def test_a_hook_that_looks_at_all_rows_of_a_layer_is_not_given_blocks_of_them(takes_blocks: bool) -> None:
    """It would see the queries of the last block alone, as if they were all."""

    class Looking(Noting):
        pass

    Looking.takes_blocks = takes_blocks
    model, calls = tiny_model("llama"), list[tuple[str, str, int]]()
    attention = CausalAttention(model.empty_cache(3), start=0, pads=[0], hooks=[Looking("it", calls)])
    with nullcontext() if takes_blocks else pytest.raises(AssertionError, match="'Looking'.* look at all rows"):
        model.forward(IDS, attention, start=0, pads=[0], row_tokens=2)
    assert sorted(calls) == (sorted(noted("llama", "it")) if takes_blocks else [])


def test_a_layer_is_closed_once_the_last_one_that_reads_it_has_attended() -> None:
    model, calls = tiny_model("gemma3n_text"), noted("gemma3n_text", "it")
    readers = {
        source: max(each for each, of in model.reads_kv_of.items() if of == source)
        for source in model.reads_kv_of.values()
    }
    assert readers
    for layer in range(model.num_layers):
        at = calls.index(("it", "closed", layer))
        assert calls[at + 1] == ("it", "attended", readers.get(layer, layer))
    attended = [layer for _, name, layer in calls if name == "attended"]
    assert attended == list(range(model.last_attention[0] + 1))


@pytest.mark.parametrize("moment", ["saved", "attended"])
def test_a_forward_ends_where_it_is_told(moment: str) -> None:
    calls = noted("llama", "it", ends=(1, moment))  # type: ignore[arg-type]
    assert calls[-1] == ("it", "save" if moment == "saved" else "attended", 1)


def test_what_is_not_to_be_stored_is_not() -> None:
    class Refusing(LayerHook):
        def before_save(self, call: LayerCall) -> None:
            call.stores = False

    model = tiny_model("llama")
    cache = model.empty_cache(3)
    for layer in range(model.num_layers):
        cache.layer(layer).slab_TBKX.fill_(0.5)
    attention = CausalAttention(cache, start=0, pads=[0], hooks=[Refusing()])
    model.forward(IDS, attention, start=0, pads=[0])
    assert all(bool((cache.layer(layer).slab_TBKX == 0.5).all()) for layer in range(model.num_layers))


def test_hidden_states_are_those_of_one_layer_alone() -> None:
    """Seen to fail: those of the last layer that was shown its own."""
    model, shown = tiny_model("llama"), list[Tensor | None]()

    class Seeing(LayerHook):
        def attended(self, call: LayerCall) -> None:
            shown.append(call.input_BCD)

    attention = CausalAttention(model.empty_cache(3), start=0, pads=[0], hooks=[Seeing()])
    x_BCD = torch.ones(1, 3, 4)
    attention.see_attention_input(0, x_BCD)
    for layer, shape in enumerate(model.kv_shapes[:2]):
        k_BKCH = torch.ones(1, shape.num_kv_heads, 3, shape.key_dim, dtype=shape.dtype)
        attention.attend(layer, k_BKCH, k_BKCH, torch.ones_like(k_BKCH), AttentionTerms(scaling=1.0))
    assert shown[0] is x_BCD and shown[1] is None
