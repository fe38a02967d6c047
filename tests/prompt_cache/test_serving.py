"""Prompts that reuse K,V give what one forward over the same tokens under a mask gives."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.prompt_cache import PromptCache, Schema
from policies.reuse import ReusingPrompt, Segment, SegmentUse
from runahead import Engine, GenerationOptions
from runahead.attention import op
from runahead.attention.partial import AttentionTerms
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVShape, Slabs
from runahead.config import PrefillName, PrefillOptions
from runahead.reuse import cache as reused_cache
from runahead.reuse import reused_kv
from runahead.reuse.reuse import Reuse
from runahead.reuse.reused_kv import ReusedKV, ReusedPart
from runahead.reuse.store import SegmentStore
from tests.conftest import RankPools
from tests.families import build, largest_difference, oracle_logits, prompt, throughout
from tests.prompt_cache.serving import (
    byte_model,
    one_rank,
    plain,
    random_prompt,
    random_segments,
    serve,
    serve_on_ranks,
    written_out,
    written_out_logits,
)
from tests.ranks.tasks import tiny_model
from tests.tokenizers_for_tests import byte_level

FAMILIES = {
    "llama": "grouped queries, rotary",
    "falcon_multi_query": "one kv head, rotary, an adapter",
    "gpt2": "multi-head, learned positions",
    "gpt_bigcode": "one kv head, learned positions",
    "opt": "learned positions with an offset",
    "bloom": "ALiBi",
    "mpt": "ALiBi relative to the last position",
    "falcon_alibi": "ALiBi as Falcon has it",
    "mistral": "a window of positions",
    "gemma2": "a soft cap, and windows in some layers",
    "gpt_oss": "a sink logit, and windows",
}
# float64: what is left is rounding, in softmaxes and merges of a few dozen numbers.
EXACT = 1e-9


@pytest.mark.parametrize(
    ("few_parts", "chunk_tokens"), [(0, None), (9, None), (9, 3)], ids=["joined for decoding", "apart", "in pieces"]
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(6)
def test_reuse_equals_one_forward_under_a_mask(family: str, few_parts: int, chunk_tokens: int | None) -> None:
    model, draw = tiny_model(family), random.Random(1)
    segments = random_segments(draw)
    store = SegmentStore(model)
    for _ in range(4):
        asked = random_prompt(draw, segments)
        served = serve(model, [asked], store=store, following=(5, 7), few_parts=few_parts, chunk_tokens=chunk_tokens)
        assert served is not None
        for step, logits_BV in enumerate(served.logits):
            expected = written_out_logits(model, asked, (5, 7)[:step])
            assert largest_difference(logits_BV[0], expected) < EXACT


@pytest.mark.parametrize("family", ["llama", "bloom", "mistral", "gpt_oss"])
def test_a_long_text_sees_all_parts_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = tiny_model(family), random.Random(5)
    segments = random_segments(draw)
    prompts = [random_prompt(draw, segments) for _ in range(4)]
    few = serve(model, prompts, following=(5, 7))
    monkeypatch.setattr(reused_cache, "FEW_QUERIES", 0)
    many = serve(model, prompts, following=(5, 7))
    assert few is not None and many is not None
    for ours, theirs in zip(many.logits, few.logits, strict=True):
        assert largest_difference(ours, theirs) < EXACT
    alone = serve(model, prompts[:1])
    assert alone is not None
    assert largest_difference(alone.logits[0][0], written_out_logits(model, prompts[0])) < EXACT


def test_parts_are_put_together_for_a_long_text_alone() -> None:
    calls: list[tuple[int, int]] = []

    def counting(q_BNQH: Tensor, k_BKTH: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        calls.append((q_BNQH.shape[2], k_BKTH.shape[2]))
        return attend(q_BNQH, k_BKTH, *rest, **more)

    attend = op.attend_range
    model = tiny_model("llama")
    uses = [
        SegmentUse(
            segment=Segment(name=f"{start}", ids=tuple(prompt(10)), positions=tuple(range(start, start + 10))),
            parts=(range(10),),
        )
        for start in (0, 10, 20)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "attend_range", counting)
        for num_new, seen in ((reused_cache.FEW_QUERIES, [10, 10, 10]), (reused_cache.FEW_QUERIES + 1, [30])):
            new = range(30, 30 + num_new)
            asked = ReusingPrompt(uses=tuple(uses), new_ids=tuple(prompt(num_new)), new_positions=tuple(new))
            store = SegmentStore(model)
            serve(model, [asked], store=store)  # encodes
            calls.clear()
            serve(model, [asked], store=store)
            whole = [(num_new, num_new), *((num_new, each) for each in seen)]
            last = [(1, num_new), (1, 10), (1, 10), (1, 10)]  # of the last layer the last token alone
            assert calls == whole * (len(model.kv_shapes) - 1) + last


def test_parts_of_the_same_rows_are_one_for_decoding_and_let_go() -> None:
    def part(positions: range, *rows: int) -> ReusedPart:
        layers = [torch.tensor(positions).view(-1, 1, 1) + 100.0 * layer for layer in range(2)]
        return ReusedPart(layers_TKX=layers, positions_T=torch.tensor(positions), rows=rows)

    first = [part(range(6, 9), 1), part(range(0, 2), 0, 1), part(range(4, 6), 0, 1)]
    parts = [part(range(2, 4), 0, 1), *first, part(range(9, 10), 0, 1)]
    assert len(parts) - 1 > reused_kv.FEW_PARTS
    freed = weakref.ref(parts[0].layers_TKX[1])
    reused = ReusedKV(parts=parts, positions_BS=torch.tensor([[9], [9]]), ends=[10, 10])
    both, second = reused.joined().parts
    assert second is parts[1]
    positions = [*range(6), 9]
    assert both.rows == (0, 1) and both.positions_T.tolist() == positions
    for layer in range(2):
        assert both.layers_TKX[layer].flatten().tolist() == [100.0 * layer + position for position in positions]
    assert both.layers_TKX[1] is both.layers_TKX[1]
    few = replace(reused, parts=parts[: reused_kv.FEW_PARTS])
    assert set(map(id, few.joined().parts)) == set(map(id, few.parts))
    mapped = replace(reused, parts=[replace(each, is_mapped=True) for each in parts])
    assert set(map(id, mapped.joined().parts)) == set(map(id, mapped.parts))  # memory may have no room for them
    del reused, parts, first, few, mapped
    assert freed() is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_mask_is_that_of_transformers(family: str) -> None:
    """The comparison above is with attention of our own, so it is compared with transformers' too."""
    model, draw = tiny_model(family), random.Random(2)
    asked = random_prompt(draw, random_segments(draw))
    written = written_out(asked)
    bias_SS = torch.zeros_like(written.allowed_SS, dtype=torch.float64).masked_fill(~written.allowed_SS, -torch.inf)
    with torch.inference_mode():
        theirs = build(family, attention="eager")(
            input_ids=torch.tensor([written.ids]),
            position_ids=torch.tensor([written.positions]),
            attention_mask=bias_SS[None, None],
            use_cache=False,
        ).logits[0, -1]
    served = serve(model, [asked])
    # transformers' eager attention takes its softmax in float32 here.
    assert served is not None and largest_difference(served.logits[0][0], theirs) < 1e-4


@pytest.mark.parametrize("family", ["llama", "bloom", "mistral"])
def test_prompts_of_a_batch_do_not_see_each_other(family: str) -> None:
    model, draw = tiny_model(family), random.Random(3)
    segments = random_segments(draw)
    prompts = [random_prompt(draw, segments) for _ in range(4)] + [plain(prompt(9))]
    assert len({len(each.new_ids) for each in prompts}) > 1
    together = serve(model, prompts, following=(5, 7))
    assert together is not None
    for row, each in enumerate(prompts):
        alone = serve(model, [each], following=(5, 7))
        assert alone is not None
        for ours, theirs in zip(together.logits, alone.logits, strict=True):
            assert largest_difference(ours[row], theirs[0]) < EXACT


def test_prompts_of_a_batch_share_what_they_have_in_common() -> None:
    model = tiny_model("llama")
    segment = Segment(name="a", ids=tuple(prompt(20)), positions=tuple(range(20)))
    use = SegmentUse(segment=segment, parts=(range(20),))
    prompts = [ReusingPrompt(uses=(use,), new_ids=(token,) * 3, new_positions=(20, 21, 22)) for token in (5, 6, 7, 8)]
    store = SegmentStore(model)
    with throughout(model.dtype):
        reuse = Reuse(prompts, store, model, one_rank())
        reuse.encode_missing()
        [part] = reuse.fetch().parts
    found = store.find(segment)
    assert found is not None and part.rows == (0, 1, 2, 3)
    for ours, kept in zip(part.layers_TKX, found.layers_TKX, strict=True):
        assert ours.data_ptr() == kept.data_ptr()  # where it lies, not a copy


def test_one_segment_and_new_text_are_the_plain_prompt() -> None:
    model, ids = tiny_model("llama"), prompt(40)
    segment = Segment(name="all", ids=tuple(ids[:33]), positions=tuple(range(33)))
    asked = ReusingPrompt(
        uses=(SegmentUse(segment=segment, parts=(range(33),)),),
        new_ids=tuple(ids[33:]),
        new_positions=tuple(range(33, 40)),
    )
    served = serve(model, [asked])
    assert served is not None and served.report.cached_tokens == 33
    assert largest_difference(served.logits[0][0], oracle_logits("llama", tuple(ids))) < EXACT


SCHEMA = """<schema name="s">the letters <module name="a">of the captain </module><module name="b">to his sister
</module><module name="c">from the ice</module>{scaffold}</schema>"""


@pytest.mark.parametrize(
    ("schema", "asked", "is_exact"),
    [
        ('<schema name="s"><module name="a">the letters of the captain</module></schema>', "<a/>hello", True),
        (SCHEMA.format(scaffold='<scaffold modules="a b c"/>'), "<c/><a/><b/>hello", True),
        (SCHEMA.format(scaffold='<scaffold modules="a b"/>'), "<a/><b/>hello", True),
        (SCHEMA.format(scaffold=""), "<a/><b/><c/>hello", False),
    ],
    ids=["one module", "full scaffold", "scaffold", "independent"],
)
def test_a_schema_of_one_module_and_a_scaffold_are_exact(schema: str, asked: str, is_exact: bool) -> None:
    model = byte_model()
    made = PromptCache(Schema.from_xml(schema), byte_level(), link_tokens=0)
    reusing = made.prompt(f'<prompt schema="s">{asked}</prompt>')
    served, whole = serve(model, [reusing]), serve(model, [plain(reusing.ids)])
    assert served is not None and whole is not None
    difference = largest_difference(served.logits[0][0], whole.logits[0][0])
    assert difference < EXACT if is_exact else difference > 1e-3
    every = PromptCache(Schema.from_xml(schema), byte_level(), link_tokens=1000)
    again = serve(model, [every.prompt(f'<prompt schema="s">{asked}</prompt>')])
    assert again is not None and largest_difference(again.logits[0][0], whole.logits[0][0]) < EXACT


def test_placeholders_are_seen_by_their_module_and_never_served() -> None:
    model, draw = tiny_model("llama"), random.Random(5)
    outer = random_segments(draw)[0]
    other = replace(outer, ids=(*outer.ids[:2], 9, 10, *outer.ids[4:]))
    first, second = SegmentStore(model), SegmentStore(model)
    ends = []
    for segment, store in ((outer, first), (other, second)):
        use = SegmentUse(segment=segment, parts=(range(len(segment.stored)),))
        asked = ReusingPrompt(uses=(use,), new_ids=(5, 6), new_positions=(2, 40))
        served = serve(model, [asked], store=store)
        found = store.find(segment)
        assert served is not None and found is not None and len(found.layers_TKX[0]) == len(segment.ids) - 2
        ends.append(served.logits[0][0])
        assert asked.ids[2] == 5 and 9 not in asked.ids[:4]
    assert largest_difference(ends[0], ends[1]) > 1e-6  # what stands behind a placeholder saw it


@pytest.mark.parametrize(
    ("size", "family", "lengths"),
    [(2, "llama", (0.6, 0.4)), (2, "bloom", (0.5, 0.5)), (3, "mistral", (0.5, 0.0, 0.5)), (3, "gpt2", (0.3, 0.3, 0.4))],
)
def test_new_text_is_split_over_ranks(
    rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory, size: int, family: str, lengths: tuple[float, ...]
) -> None:
    draw = random.Random(6)
    segments = random_segments(draw)
    prompts = [random_prompt(draw, segments) for _ in range(3)]
    longest = max(len(each.new_ids) for each in prompts)
    split = [int(share * longest) for share in lengths[:-1]]
    split.append(longest - sum(split))
    folder = str(tmp_path_factory.mktemp("store")) if size == 3 else None
    *_, (logits, report) = rank_pools.run(size, serve_on_ranks, family, prompts, split, folder)
    alone = serve(tiny_model(family), prompts, following=(5, 7))
    assert alone is not None and logits is not None
    for ours, theirs in zip(logits, alone.logits, strict=True):
        assert largest_difference(ours, theirs) < EXACT
    if folder is not None:  # each rank encoded a share
        assert 0 < report.encoded_tokens < alone.report.encoded_tokens


def test_the_engine_generates_from_what_is_reused_and_tells_so() -> None:
    model, draw = tiny_model("llama"), random.Random(7)
    segments = random_segments(draw)
    asked = [random_prompt(draw, segments), random_prompt(draw, segments)]
    engine = Engine(model, one_rank())
    options = GenerationOptions(max_new_tokens=4, ignore_eos=True)
    first, second = engine.generate([*asked, prompt(7)], options), engine.generate([*asked, prompt(7)], options)
    for row, each in enumerate(asked):
        tokens: list[int] = []
        for _ in range(4):
            tokens.append(int(written_out_logits(model, each, tokens).argmax()))
        assert first.generations[row].new_token_ids == second.generations[row].new_token_ids == tokens
        assert first.generations[row].prompt_tokens == each.num_cached + len(each.new_ids)
    report, again = first.ranks[0].reuse, second.ranks[0].reuse
    assert report is not None and again is not None
    assert report.encoded_tokens > 0 == again.encoded_tokens
    assert report.cached_tokens == sum(each.num_cached for each in asked)
    assert report.computed_tokens == first.boundaries[-1]
    assert again.stored_bytes["host"] == sum(
        len(segment.stored) * sum(shape.bytes_per_token() for shape in model.kv_shapes)
        for segment in {use.segment for each in asked for use in each.uses}
    )


def test_no_cache_waits_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle of references would keep keys and values of every call, and of every encoded segment."""
    draw = random.Random(3)
    model, made, make = tiny_model("llama"), [], KVCache.__init__

    def noted(self: KVCache, *args: Any, **keywords: Any) -> None:
        make(self, *args, **keywords)
        made.extend(weakref.ref(layer.slab.slab_TBKX) for layer in self.layers)

    monkeypatch.setattr(KVCache, "__init__", noted)
    engine, asked = Engine(model, one_rank()), random_prompt(draw, random_segments(draw))
    gc.collect()
    gc.disable()
    try:
        engine.generate([asked], GenerationOptions(max_new_tokens=3, ignore_eos=True))
        assert len(made) >= 2 * len(model.kv_shapes)  # of a segment that was encoded, and of the prompt
        assert [each for each in made if each() is not None] == []
    finally:
        gc.enable()


def test_what_cannot_reuse_is_refused() -> None:
    asked = random_prompt(random.Random(8), random_segments(random.Random(8)))
    for family in ("bart", "llama_dynamic_ntk"):
        with pytest.raises(ValueError, match="keys and values cannot be reused in other prompts; use policy=full"):
            Engine(tiny_model(family), one_rank()).generate([asked], GenerationOptions(max_new_tokens=1))
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="prompt 0 ends at position .* exceeds the model's 512 positions"):
        Engine(model, one_rank()).generate([asked], GenerationOptions(max_new_tokens=500))
    zigzag = PrefillOptions(name=PrefillName.zigzag)
    with pytest.raises(ValueError, match="reuse of segments needs prefill=kv_runahead or prefill=single"):
        Engine(model, one_rank(), prefill=zigzag).generate([asked], GenerationOptions(max_new_tokens=1))


def test_positions_with_gaps_are_sent_to_the_device_only_where_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of a long text would else wait for its copy in each step."""
    kv_TKX, new = torch.randn(6, 1, 8), torch.randn(1, 1, 9, 4)
    part = ReusedPart(layers_TKX=[kv_TKX], positions_T=torch.tensor([0, 1, 2, 10, 11, 12]), rows=(0,))
    reused = ReusedKV(parts=[part], positions_BS=torch.tensor([[3, 5, 9, 14]]), ends=[15])
    shape = KVShape(num_kv_heads=1, key_dim=4, value_dim=4, dtype=torch.float32)
    own = Slabs.empty([shape], batch=1, spans=[(0, 9)], num_slabs=1, device=torch.device("cpu"))
    own.by_layer[0].write(0, new, new)
    sent, layer = list[int](), reused_cache.reusing(own, reused).layers[0]
    monkeypatch.setattr(reused_cache, "sent", lambda host, device: (sent.append(len(host)), host)[1])
    for bias, expected in ((None, []), (lambda keys_S: 0.1 * keys_S[None], [7, 6])):
        seen = layer.seen(new[:, :, 6:7], NewTokens(6, [0]))
        seen.attend(AttentionTerms(scaling=0.5, key_bias=bias))
        assert sent == expected
