"""A conversation goes on with what transformers has computed as if it had been fed all of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from policies.snapkv import SnapKV
from runahead import Conversation, GenerationOptions
from runahead.dynamic_cache import taken
from runahead.thinning.rank_policies import RankPolicies
from tests.dynamic_cache import tasks
from tests.families import VOCAB_SIZE, WINDOW, largest_difference, oracle_logits, prompt, throughout
from tests.ranks.tasks import tiny_model

IDS, TURN, SHORTER = prompt(70), prompt(20, seed=4), prompt(50, seed=3)
FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3_text"]


def filled(family: str, ids: list[int], *, with_config: bool = True) -> DynamicCache:
    module = tasks.reference(family)
    cache = DynamicCache(config=module.config if with_config else None)
    with throughout(torch.float64), torch.no_grad():
        module(torch.tensor([ids]), past_key_values=cache)
    return cache


def take(family: str, cache: DynamicCache, ids: Tensor | list[int], **more: Any) -> Conversation:
    ours = Conversation(tiny_model(family))
    with throughout(torch.float64):
        ours.take(cache, ids if isinstance(ids, Tensor) else torch.tensor([ids]), **more)
    return ours


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_taken", [1, 9, 70])
@pytest.mark.parametrize("with_config", [True, False], ids=["windows cut", "windows whole"])
def test_later_logits_are_those_of_one_pass(family: str, num_taken: int, with_config: bool) -> None:
    ours = take(family, filled(family, IDS[:num_taken], with_config=with_config), IDS)
    with throughout(torch.float64):
        if num_taken < len(IDS):
            assert ours.logits_BV is not None
            assert largest_difference(ours.logits_BV, oracle_logits(family, tuple(IDS))) < 1e-9
        logits = ours.feed(torch.tensor([TURN]), all_logits=True)
        with torch.no_grad():
            expected = tasks.reference(family)(torch.tensor([IDS + TURN])).logits[:, len(IDS) :]
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_padded_rows_go_on_after_an_answer_of_transformers(family: str) -> None:
    ids, mask = tasks.padded([SHORTER, IDS])
    module = tasks.reference(family)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    with throughout(torch.float64):
        first = module.generate(ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True, **options)
        mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], dim=1)
        expected = module.generate(first.sequences, attention_mask=mask, max_new_tokens=6, **options)
        ours = take(family, first.past_key_values, first.sequences, pads=[20, 0])
        answer = ours.generate(GenerationOptions(max_new_tokens=6, ignore_eos=True))
    assert [row.new_ids for row in answer.rows] == expected[:, -6:].tolist()


def test_pieces_that_are_padding_of_all_rows_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded to a length that all of them are below."""
    monkeypatch.setattr(taken, "PIECE_TOKENS", 8)
    rows, module = [SHORTER, SHORTER[5:]], tasks.reference("llama")
    ids, mask = (F.pad(each, (20, 0)) for each in tasks.padded(rows))
    with throughout(torch.float64):
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        first = module.generate(ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True, **options)
        ours = take("llama", first.past_key_values, first.sequences, pads=[20, 25])
        answer = ours.generate(GenerationOptions(max_new_tokens=3, ignore_eos=True))
        mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], dim=1)
        expected = module.generate(first.sequences, attention_mask=mask, max_new_tokens=3, **options)
    assert [row.new_ids for row in answer.rows] == expected[:, -3:].tolist()


def test_the_cache_that_was_taken_stays_as_it_was() -> None:
    cache = filled("llama", IDS)
    before = [layer.keys.clone() for layer in cache.layers]
    ours = take("llama", cache, IDS)
    with throughout(torch.float64):
        ours.feed(torch.tensor([TURN]))
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_a_copy_of_a_conversation_goes_on_by_itself() -> None:
    ours = take("mistral", filled("mistral", IDS), IDS)
    other = ours.fork()
    with throughout(torch.float64):
        other.feed(torch.tensor([SHORTER]))
        logits = ours.feed(torch.tensor([TURN]))
    assert largest_difference(logits, oracle_logits("mistral", tuple(IDS + TURN))) < 1e-9


OTHER = [*IDS[:-1], (IDS[-1] + 1) % VOCAB_SIZE]
EARLIER = [(IDS[0] + 1) % VOCAB_SIZE, *IDS[1:]]


@pytest.mark.parametrize(
    ("family", "ids"), [("llama", OTHER), ("mistral", OTHER), ("llama", EARLIER)], ids=["last", "window", "first"]
)
def test_another_text_is_an_error(family: str, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="computes of these ids"):
        take(family, filled(family, IDS), ids)


def test_ids_before_the_window_of_the_first_layer_are_not_seen() -> None:
    """As docs/library.md says: nothing that the first layer still holds depends on them."""
    place = len(IDS) - WINDOW
    for at, reason in [(place - 1, ""), (place + 1, "computes of these ids")]:
        ids = [*IDS[:at], (IDS[at] + 1) % VOCAB_SIZE, *IDS[at + 1 :]]
        with pytest.raises(ValueError, match=reason) if reason else nullcontext():
            take("gemma3_text", filled("gemma3_text", IDS), ids)
    with pytest.raises(ValueError, match="computes of these ids"):  # windows are whole in a cache without a config
        take("gemma3_text", filled("gemma3_text", IDS, with_config=False), EARLIER)


def test_another_padding_is_an_error() -> None:
    with pytest.raises(ValueError, match="computes of these ids"):
        take("llama", filled("llama", IDS), IDS, pads=[3])


def test_a_cache_that_was_computed_otherwise_in_a_later_layer_is_an_error() -> None:
    cache = filled("llama", IDS)
    cache.layers[1].keys[:, :, 30] += 3  # which the last token sees, and gives layer 2 another input
    with pytest.raises(ValueError, match="layer 2 of the cache has other keys or values of the last token"):
        take("llama", cache, IDS)


def test_a_window_that_was_given_its_tail_alone_is_an_error() -> None:
    """transformers then counts wrong positions, and says nothing."""
    module, whole = tasks.reference("gemma3_text"), filled("gemma3_text", IDS)
    tails = [(layer.keys, layer.values) for layer in whole.layers]
    with pytest.raises(ValueError, match="has to be given all tokens of a text"):
        take("gemma3_text", DynamicCache(tails, config=module.config), IDS)


def test_a_window_that_has_lost_what_is_seen_is_an_error() -> None:
    cache = filled("mistral", IDS)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
    with pytest.raises(ValueError, match="and the next token sees"):
        take("mistral", cache, IDS)


@pytest.mark.parametrize(
    ("cache", "ids", "reason"),
    [
        (lambda: filled("gemma2", IDS), IDS, "of the cache"),
        (lambda: filled("llama", IDS), IDS[:-1], "give the ids of all of its tokens"),
        (DynamicCache, IDS, "the cache has 0 tokens"),
    ],
    ids=["another model", "too few ids", "empty"],
)
def test_a_cache_of_something_else_is_an_error(cache: Any, ids: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        take("llama", cache(), ids)


def test_a_conversation_that_has_begun_or_drops_tokens_takes_none() -> None:
    ours = take("llama", filled("llama", IDS), IDS)
    with pytest.raises(ValueError, match="has begun"):
        ours.take(filled("llama", IDS), torch.tensor([IDS]))
    thinned = Conversation(tiny_model("llama"), RankPolicies.everywhere([SnapKV(budget=40)]))
    with pytest.raises(ValueError, match="may leave some out"):
        thinned.take(filled("llama", IDS), torch.tensor([IDS]))
