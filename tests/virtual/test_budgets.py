"""What each way of decoding asks of a GPU: kernels per layer and token, and how often the host waits.

The numbers are pinned as they were found. A commit that changes one says why. Other versions of torch and transformers
than those of constraints.txt may launch other kernels, so that only waits are compared then.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from policies import POLICIES, WRAPPERS
from policies.adakv import AdaKV
from policies.base import Policy
from policies.quest import Quest
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks
from runahead.cache import host_memory
from runahead.cache.kv_cache import KVCache
from runahead.config import CacheOptions
from runahead.context import ContextPartition
from runahead.decoding.forward import FixedForward, fastest_form
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, batch_ids
from runahead.decoding.rows import Rows
from runahead.decoding.sampling import next_tokens
from runahead.thinning.rank_policies import RankPolicies
from tests.families import ROPE_THRESHOLD, VOCAB_SIZE, build
from tests.virtual.cuda import Counts, counting, virtual_gpu
from tests.virtual.cuda.guard import require_guard

GPU = torch.device("cuda", 0)
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
HAS_PINNED_VERSIONS = all(
    f"{module.__name__}=={module.__version__.split('+')[0]}" in CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    for module in (torch, transformers)
)
FEW_LAYERS, MORE_LAYERS = 2, 4
"""What a layer more asks for is what two layers more ask for: some policies take layers in pairs."""

FROM_TOKEN, TO_TOKEN = 3, 7
"""Tokens between which a run is counted. Policies cut back every 4 tokens, and a graph is captured before the first."""

ONCE = {"scored_tokens.py": 1}
"""The one wait that every step needs: for its tokens."""

PROMPT = {**ONCE, "clock.py": 2}
"""The waits of every prompt: for its first tokens, and for the times of its report."""


@pytest.fixture(autouse=True, scope="module")
def a_virtual_gpu(own_cache: object) -> Iterator[None]:
    """A virtual GPU, which counts."""
    if torch.cuda.is_available():
        pytest.skip("the virtual GPU needs a CPU build of torch")
    require_guard()
    with virtual_gpu():
        yield
        llama.cache_clear()


@pytest.fixture(autouse=True)
def nothing_of_tests_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No page-locked memory is there, and none is given back in between, for which the host would wait."""
    gc.collect()
    monkeypatch.setattr(host_memory, "_arena", host_memory._Arena())
    gc.disable()
    yield
    gc.enable()


@cache
def llama(num_layers: int, num_kv_heads: int) -> Model:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        max_position_embeddings=1024,
    )
    model = Model(LlamaForCausalLM(config).to(device=GPU, dtype=torch.bfloat16).eval())
    for name in ("known_rotaries", "rotations", "query_prediction", "token_kinds", "output_projections", "fingerprint"):
        getattr(model, name)  # what a model finds out about itself once
    return model


def engine(model: Model, policies: Sequence[Policy] = (), **options: Any) -> Engine:
    storage = options.pop("storage", None)
    ranks = Ranks(0, 1, device=GPU, backend="nccl", timeout_s=20)
    return Engine(model, ranks, policies=RankPolicies.everywhere(policies, storage=storage), **options)


def ids(num_tokens: int, *, seed: int = 2) -> list[int]:
    return torch.randint(211, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Window:
    """What was counted between two of the tokens that `step` is told of."""

    counts: Counts
    seen: list[tuple[int, Counter[str]]] = field(default_factory=list)

    def step(self, _: Any = None) -> list[int]:
        waits = Counter({f"{place} {operation}": number for (operation, place), number in self.counts.waits.items()})
        self.seen.append((self.counts.kernels.total(), waits))
        return []

    def between(self, first: int, last: int) -> tuple[float, dict[str, float]]:
        """Kernels and waits, by place, of each step."""
        (before, waits_before), (after, waits_after) = self.seen[first], self.seen[last]
        waits = waits_after - waits_before
        return (after - before) / (last - first), {place: number / (last - first) for place, number in waits.items()}


Decode = Callable[[Model, Window], None]
"""Decodes with a model, and tells of each step: first of what chooses a prompt's first token."""


def generated(
    prompts: list[list[int]],
    policies: Sequence[Policy] = (),
    *,
    storage: CacheOptions | None = None,
    **options: Any,
) -> Decode:
    """What `Engine.generate` decodes."""

    def run(model: Model, window: Window) -> None:
        given = GenerationOptions(max_new_tokens=TO_TOKEN + 1, ignore_eos=True, **options)
        engine(model, policies, storage=storage).generate(prompts, given, on_tokens=window.step)

    return run


def served(prompts: list[list[int]], policies: Sequence[Policy] = ()) -> Decode:
    """What a server decodes: rows of prompts that came one by one."""

    def run(model: Model, window: Window) -> None:
        options, serving = GenerationOptions(max_new_tokens=TO_TOKEN + 3, ignore_eos=True), engine(model, policies)
        live = Rows(Lanes(model, serving.policies))
        for number, prompt in enumerate(prompts):
            whole = ContextPartition(boundaries=(0, len(prompt)))
            prefilled = serving.prefill_part([prompt], whole, num_new=options.max_new_tokens)
            row = Row(model, prompt, options, seed=0)
            assert prefilled.cache is not None and prefilled.logits_BV is not None
            live.join([(number, 0)], [row], prefilled.logits_BV, prefilled.cache, [len(prompt)])
        window.step()
        for _ in range(TO_TOKEN):
            live.step()
            window.step()

    return run


def drafted(prompts: list[list[int]]) -> Decode:
    """What speculation decodes: drafts of three tokens, whichever of them it would take."""

    def run(model: Model, window: Window) -> None:
        longest, drafting = max(map(len, prompts)), engine(model)
        whole = ContextPartition(boundaries=(0, longest))
        prefilled = drafting.prefill_part(prompts, whole, num_new=3 * (TO_TOKEN + 1))
        assert isinstance(prefilled.cache, KVCache)
        pads = [longest - len(prompt) for prompt in prompts]
        cache, ids = (
            fastest_form(prefilled.cache, model, pads=pads, num_tokens=longest, apart=True),
            batch_ids(len(pads)),
        )
        lanes = Lanes.holding(model, ids, cache, pads=pads, num_tokens=longest)
        samplers = [Row(model, prompt, GenerationOptions(), seed=0).sampler for prompt in prompts]
        window.step()
        for _ in range(TO_TOKEN):
            found = lanes.verify({id: [5, 6, 7] for id in ids})
            next_tokens(samplers, torch.stack([logits_CV[-1] for logits_CV in found.values()]))
            window.step()

    return run


SNAPKV = SnapKV(budget=40, window=8)
ADAKV = AdaKV(scorer=SNAPKV)

DROPPING: dict[str, dict[str, Any]] = {
    "window": {"budget": 40},
    "streaming_llm": {"budget": 40, "evict_every": 4},
    "h2o": {"budget": 40, "evict_every": 4},
    "snapkv": {"budget": 40, "window": 8, "evict_every": 4},
    "pyramidkv": {"budget": 40, "window": 8, "evict_every": 4},
    "keydiff": {"budget": 40, "evict_every": 4},
    "tova": {"budget": 40, "evict_every": 4},
    "expected_attention": {"budget": 40, "future_tokens": 8, "evict_every": 4},
    "lagkv": {"budget": 40, "lag": 8, "evict_every": 4},
    "chunkkv": {"budget": 40, "window": 8, "chunk": 4},
    "r_kv": {"budget": 40, "window": 8, "evict_every": 4},
    "kvzip": {"budget": 40},
    "zigzagkv": {"budget": 40, "window": 8},
    "scissorhands": {"budget": 40, "recent": 8, "window": 8, "evict_every": 4},
    "keyformer": {"budget": 40, "evict_every": 4},
    "k_centers": {"budget": 40, "evict_every": 4},
    "fastgen": {},
    "minicache": {"start_share": 0.0},
    "pyramidinfer": {"mean_keep": 0.6, "evict_every": 4},
}
"""Policies that drop tokens; some of them after the prompt alone."""

RETRIEVING: dict[str, dict[str, Any]] = {
    "infinigen": {"fetch": 32, "ahead": True, "first_ahead": 1, "first_layer": 1},
    "infinigen, as many as needed": {"alpha": 2.0, "max_fetch": 0.5, "ahead": True, "first_ahead": 1, "first_layer": 1},
    "quest": {"fetch": 32},
    "quest, late": {"fetch": 32, "late": 1.0},
    "shadowkv": {"fetch": 32},
    "sparq": {"fetch": 32},
    "clusterkv": {"fetch": 32},
    "squeezed_attention": {},
    "retroinfer": {},
    "infllm": {"recent": 32},
    "exact_topk": {"fetch": 32},
    "offload": {},
}
"""Policies that retrieve, which choose slots in every layer from some layer on."""


def ways() -> dict[str, tuple[Decode, int]]:
    """Ways of decoding by name, each with the number of KV heads that it takes, beside 4 query heads."""
    found: dict[str, tuple[Decode, int]] = {}
    for ending, prompts in (("", [ids(80)]), (", padded", [ids(80), ids(60, seed=3), ids(35, seed=4)])):
        found["eager" + ending] = generated(prompts), 4
        found["static" + ending] = generated(prompts), 2
        found["replayed" + ending] = generated(prompts), 2
        found["served" + ending] = served(prompts), 2
        found["served under a policy" + ending] = served(prompts, [SNAPKV]), 2
        found["sampled" + ending] = generated(prompts, do_sample=True, top_p=0.9, repetition_penalty=1.1), 2
        found["drafted" + ending] = drafted(prompts), 2
        for bits in (4, 2):
            found[f"{bits} bits" + ending] = generated(prompts, storage=CacheOptions(bits=bits, residual=32)), 2
        found["unequal heads" + ending] = generated(prompts, [ADAKV]), 2
        found["unequal heads in 4 bits" + ending] = (
            generated(prompts, [ADAKV], storage=CacheOptions(bits=4, residual=8)),
            2,
        )
        for name, options in DROPPING.items():
            found[name + ending] = generated(prompts, [POLICIES[name](**options)]), 2
        for name, options in RETRIEVING.items():
            retriever = POLICIES[name.split(",")[0]](**{"min_tokens": 0, **options})
            found[name + ending] = generated(prompts, [retriever]), 2
    return found


WAYS = ways()
UNDER_POLICIES = [name for name in WAYS if name.split(",")[0] in {*DROPPING, *RETRIEVING}]

LEFT_OUT = {
    "full": "the ways without a policy are its own",
    "adakv": "the ways of unequal heads are its own",
    "criticalkv": "it decodes over the tokens that another policy's scores choose",
    "razor_attention": "it decodes over unequal heads",
    "duo_attention": "it decodes over unequal heads",
    "kvzap": "it needs trained weights",
    "dms": "it needs a model that marks tokens",
}
"""Policies without ways of their name, and why."""

Waits = Mapping[str, float]
"""Number of times that the host waits, by file."""

BUDGETS: dict[str, tuple[float, Waits, Waits]] = {
    "eager": (40, ONCE, PROMPT),
    "static": (41, ONCE, PROMPT),
    "replayed": (0, ONCE | {"forward.py": 0.25}, PROMPT),  # once, after the capture
    "served": (40, ONCE, PROMPT),
    "served under a policy": (41, ONCE, PROMPT),
    "sampled": (41, ONCE, PROMPT),
    "drafted": (49, ONCE, {"clock.py": 2}),
    "4 bits": (77, ONCE, PROMPT),
    "2 bits": (89, ONCE, PROMPT),
    "unequal heads": (53, ONCE, PROMPT | {"adakv.py": 4, "cutting.py": 4}),
    "unequal heads in 4 bits": (117.5, ONCE, PROMPT | {"adakv.py": 4, "cutting.py": 4}),
    "window": (41, ONCE, PROMPT),
    "streaming_llm": (47.5, ONCE, PROMPT),
    "h2o": (73.75, ONCE, PROMPT),
    "snapkv": (41, ONCE, PROMPT),
    "pyramidkv": (41, ONCE, PROMPT),
    "keydiff": (50.75, ONCE, PROMPT),
    "tova": (53.5, ONCE, PROMPT),
    "expected_attention": (104, ONCE, PROMPT),
    "lagkv": (63.5, ONCE, PROMPT),
    "chunkkv": (41, ONCE, PROMPT),
    "r_kv": (87.25, ONCE, PROMPT),
    "kvzip": (49, ONCE, PROMPT | {"cutting.py": 4, "kvzip.py": 6, "replay.py": 1}),
    "zigzagkv": (41, ONCE, PROMPT | {"cutting.py": 4, "zigzagkv.py": 5}),
    "scissorhands": (58.5, ONCE, PROMPT),
    "keyformer": (156.75, ONCE, PROMPT),
    "k_centers": (84.75, ONCE, PROMPT),
    "fastgen": (42, ONCE, PROMPT | {"fastgen.py": 4}),
    "minicache": (51, ONCE, PROMPT),
    "pyramidinfer": (79.75, ONCE, PROMPT),
    "infinigen": (62, ONCE, PROMPT | {"copy_stream.py": 1}),
    "infinigen, as many as needed": (67, ONCE | {"retriever.py": 3}, PROMPT | {"copy_stream.py": 1}),
    "quest": (74, ONCE, PROMPT),
    "quest, late": (124, ONCE | {"retrieval.py": 2}, PROMPT),
    "shadowkv": (47, ONCE, PROMPT | {"copy_stream.py": 2}),
    "sparq": (88, ONCE, PROMPT | {"copy_stream.py": 2}),
    "clusterkv": (74, ONCE, PROMPT),
    "squeezed_attention": (71, ONCE | {"retriever.py": 2}, PROMPT),
    "retroinfer": (98, ONCE, PROMPT),
    "infllm": (95, ONCE, PROMPT | {"copy_stream.py": 2}),
    "exact_topk": (56, ONCE, PROMPT | {"copy_stream.py": 2}),
    "offload": (44, ONCE, PROMPT | {"copy_stream.py": 2}),
    "eager, padded": (44, ONCE, PROMPT),
    "static, padded": (41, ONCE, PROMPT),
    "replayed, padded": (0, ONCE | {"forward.py": 0.25}, PROMPT),
    "served, padded": (48, ONCE, {"clock.py": 6, "scored_tokens.py": 3}),
    "served under a policy, padded": (123, ONCE, {"clock.py": 6, "scored_tokens.py": 3}),
    "sampled, padded": (41, ONCE, PROMPT),
    "drafted, padded": (76, ONCE, {"clock.py": 2}),
    "4 bits, padded": (131.25, ONCE, PROMPT),
    "2 bits, padded": (157.25, ONCE, PROMPT),
    "unequal heads, padded": (50, ONCE, PROMPT | {"adakv.py": 4, "cutting.py": 4}),
    "unequal heads in 4 bits, padded": (121.5, ONCE, PROMPT | {"adakv.py": 4, "cutting.py": 4}),
    "window, padded": (45, ONCE, PROMPT),
    "streaming_llm, padded": (53.25, ONCE, PROMPT),
    "h2o, padded": (79, ONCE, PROMPT),
    "snapkv, padded": (45, ONCE, PROMPT),
    "pyramidkv, padded": (43, ONCE, PROMPT),
    "keydiff, padded": (56, ONCE, PROMPT),
    "tova, padded": (59.5, ONCE, PROMPT),
    "expected_attention, padded": (114.5, ONCE, PROMPT),
    "lagkv, padded": (99.75, ONCE, PROMPT),
    "chunkkv, padded": (45, ONCE, PROMPT),
    "r_kv, padded": (101.5, ONCE, PROMPT),
    "kvzip, padded": (50, ONCE, PROMPT | {"cutting.py": 4, "kvzip.py": 16, "replay.py": 3}),
    "zigzagkv, padded": (45, ONCE, PROMPT | {"cutting.py": 4, "zigzagkv.py": 5}),
    "scissorhands, padded": (98, ONCE, PROMPT),
    "keyformer, padded": (162, ONCE, PROMPT),
    "k_centers, padded": (93, ONCE, PROMPT),
    "fastgen, padded": (51, ONCE, PROMPT | {"base.py": 4, "cutting.py": 4, "fastgen.py": 4}),
    "minicache, padded": (73, ONCE, PROMPT),
    "pyramidinfer, padded": (85.75, ONCE, PROMPT),
    "infinigen, padded": (70, ONCE, PROMPT | {"copy_stream.py": 1}),
    "infinigen, as many as needed, padded": (83, ONCE | {"retriever.py": 3}, PROMPT | {"copy_stream.py": 1}),
    "quest, padded": (89, ONCE, PROMPT),
    "quest, late, padded": (150, ONCE | {"retrieval.py": 2}, PROMPT),
    "shadowkv, padded": (123, ONCE, PROMPT | {"copy_stream.py": 2}),
    "sparq, padded": (96, ONCE, PROMPT | {"copy_stream.py": 2}),
    "clusterkv, padded": (84, ONCE, PROMPT),
    "squeezed_attention, padded": (93, ONCE | {"retriever.py": 2}, PROMPT),
    "retroinfer, padded": (125, ONCE, PROMPT),
    "infllm, padded": (126, ONCE, PROMPT | {"copy_stream.py": 2}),
    "exact_topk, padded": (64, ONCE, PROMPT | {"copy_stream.py": 2}),
    "offload, padded": (48, ONCE, PROMPT | {"copy_stream.py": 2}),
    "a chunk, plain": (49, {"clock.py": 1}, {}),
    "a chunk, plain, padded": (62, {"clock.py": 1}, {}),
    "a chunk, 4 bits": (52, {"clock.py": 1}, {}),
    "a chunk, 4 bits, padded": (65, {"clock.py": 1}, {}),
    "a chunk, snapkv": (105, {"clock.py": 1}, {}),
    "a chunk, snapkv, padded": (108, {"clock.py": 1}, {}),
    "a chunk, quest": (54, {"clock.py": 1, "copy_stream.py": 4}, {}),
    "a chunk, quest, padded": (67, {"clock.py": 1, "copy_stream.py": 4}, {}),
}
"""Per way of decoding: kernels per layer and step; waits of the host per step by file, and per prompt until its first
tokens, in a model of `MORE_LAYERS` layers."""


@pytest.mark.parametrize("name", [name for name in WAYS if name not in UNDER_POLICIES])
def test_a_step_asks_for_no_more_than_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are operations of torch on the GPU that neither are views nor only allocate; some launch several."""
    check(name, monkeypatch)


@pytest.mark.parametrize("name", UNDER_POLICIES)
@pytest.mark.sampled(3)
def test_a_step_under_a_policy_asks_for_no_more_than_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, monkeypatch)


def check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a way of decoding with the table."""
    if not name.startswith("replayed"):
        monkeypatch.setattr(FixedForward, "WARM_UP", 2 * TO_TOKEN)  # steps that no graph holds
    decode, num_kv_heads = WAYS[name]
    steps = []
    for num_layers in (FEW_LAYERS, MORE_LAYERS):
        model = llama(num_layers, num_kv_heads)
        with counting() as counts:
            window = Window(counts)
            decode(model, window)
        steps.append(window.between(FROM_TOKEN, TO_TOKEN))
        assert not counts.pageable, "these copies wait for memory that is not page-locked"
    (few, _), (more, waits) = steps
    require(name, (more - few) / (MORE_LAYERS - FEW_LAYERS), waits, window.seen[0][1])


def require(name: str, kernels: float, step: Waits, prompt: Waits) -> None:
    """Compare with the table, which has files, since lines do not last.

    Args:
        step, prompt: waits by place, such as "runahead/x.py:12 tolist".
    """
    pinned = BUDGETS.get(name, (0, {}, {}))
    found = kernels if HAS_PINNED_VERSIONS else pinned[0], _by_file(step), _by_file(prompt)
    exceeds = found[0] > pinned[0] or any(_exceeds(*each) for each in zip(found[1:], pinned[1:], strict=True))
    assert not exceeds, f"more than pinned, {pinned}: {name!r}: {found}; waits are in {[*step, *prompt]}"
    assert found == pinned, f"better than pinned: lower it, {pinned}: {name!r}: {found}"


def _by_file(waits: Waits) -> dict[str, float]:
    found: dict[str, float] = {}
    for place, number in waits.items():
        name = Path(place.split(":")[0]).name
        found[name] = found.get(name, 0) + number
    return found


def _exceeds(found: Waits, pinned: Waits) -> bool:
    return any(number > pinned.get(name, 0) for name, number in found.items())


CHUNKS: dict[str, tuple[list[Policy], CacheOptions | None]] = {
    "plain": ([], None),
    "4 bits": ([], CacheOptions(bits=4, residual=32)),
    "snapkv": ([SNAPKV], None),
    "quest": ([Quest(min_tokens=0, fetch=32)], None),
}


@pytest.mark.parametrize("ending", ["", ", padded"])
@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_asks_for_no_more_than_before(name: str, ending: str) -> None:
    """A prefill of five chunks has so much more than one of four."""
    policies, storage = CHUNKS[name]
    chunks = []
    for num_layers in (FEW_LAYERS, MORE_LAYERS):
        prefilling = engine(llama(num_layers, 2), policies, storage=storage, prefill=PrefillOptions(chunk_tokens=20))
        with counting() as counts:
            window = Window(counts)
            for num_tokens in (80, 80, 100):  # the first one fills what is kept
                prompts = [ids(num_tokens), ids(num_tokens - 7, seed=3)] if ending else [ids(num_tokens)]
                prefilling.generate(prompts, GenerationOptions(max_new_tokens=1))
                window.step()
        (before, waits_before), (after, waits_after) = window.between(0, 1), window.between(1, 2)
        chunks.append((after - before, Counter(waits_after) - Counter(waits_before)))
        assert not counts.pageable, "these copies wait for memory that is not page-locked"
    (few, _), (more, waits) = chunks
    require(f"a chunk, {name}{ending}", (more - few) / (MORE_LAYERS - FEW_LAYERS), waits, {})


def test_every_way_has_a_budget_and_every_policy_a_way() -> None:
    chunks = [f"a chunk, {name}{ending}" for name in CHUNKS for ending in ("", ", padded")]
    assert BUDGETS.keys() == {*WAYS, *chunks}
    named = {name.split(",")[0] for name in UNDER_POLICIES}
    assert named | LEFT_OUT.keys() == {*POLICIES, *WRAPPERS} and not named & LEFT_OUT.keys()


FAMILIES = [
    "llama_dynamic_ntk",
    "phi3_longrope",
    "llama4_text",
    "mistral",
    "gemma2",
    "gemma3_text",
    "falcon_alibi",
    "bloom_6_heads",
    "mpt",
    "gptj",
]
"""Families whose positions, masks or biases are computed from numbers of the host."""


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_waits_for_its_tokens_alone(family: str, padded: bool) -> None:
    """Also beyond the length at which rotary tables change."""
    model = Model(build(family).to(device=GPU, dtype=torch.float32).eval())
    lengths = [ROPE_THRESHOLD + more for more in ((2, 9) if padded else (2,))]
    prompts = [[number % VOCAB_SIZE for number in ids(length)] for length in lengths]
    with counting() as counts:
        window = Window(counts)
        generated(prompts)(model, window)
    _, waits = window.between(FROM_TOKEN, TO_TOKEN)
    assert _by_file(waits) == ONCE, waits
