"""Ways of decoding on one GPU or CPU, and what a step of each asks for: kernels, waits of the host, torch calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from policies import POLICIES
from policies.adakv import AdaKV
from policies.base import Policy
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions, Model, Ranks
from runahead.cache.attention import CausalAttention
from runahead.cache.index import ShardIndex
from runahead.cache.kv_cache import KVCache
from runahead.cache.shard import Shard
from runahead.config import CacheOptions, Fuse
from runahead.context import ContextPartition
from runahead.decoding.forward import FixedForward, fastest_form, forward_one_by_one, forward_over
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, batch_ids
from runahead.decoding.rows import Rows
from runahead.decoding.sampling import next_tokens
from runahead.kv_transfer.gathering import LoneGathering
from runahead.prefill import Prefilled, PrefillPlan
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.virtual.cuda import Counts, counting
from tests.virtual.jobs import settled

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
HAS_PINNED_VERSIONS = all(
    f"{module.__name__}=={module.__version__.split('+')[0]}" in CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    for module in (torch, transformers)
)
FEW_LAYERS, MORE_LAYERS = 2, 4
"""Numbers of layers whose difference is what a layer more asks for, twice: some policies take layers in pairs."""

FROM_TOKEN, TO_TOKEN = 3, 7
"""Tokens between which a run is counted. Policies cut back every 4 tokens, and a graph is captured before the first."""


@cache
def llama(num_layers: int, num_kv_heads: int, device: torch.device = GPU, fuse: Fuse = Fuse.off) -> Model:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        max_position_embeddings=8192,
    )
    dtype = torch.float32 if device == CPU else torch.bfloat16
    return settled(Model(LlamaForCausalLM(config).to(device=device, dtype=dtype).eval(), fuse=fuse))


def ranks_of(model: Model) -> Ranks:
    backend = "gloo" if model.device == CPU else "nccl"
    return Ranks(0, 1, device=model.device, backend=backend, timeout_s=20)


def engine(model: Model, policies: Sequence[Policy] = (), **options: Any) -> Engine:
    storage = options.pop("storage", None)
    return Engine(model, ranks_of(model), policies=RankPolicies.everywhere(policies, storage=storage), **options)


def ids(num_tokens: int, *, seed: int = 2) -> list[int]:
    return torch.randint(211, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Window:
    """Counts at each of the tokens that `step` is told of; `read` returns the counts so far."""

    read: Callable[[], Counter[str]]
    seen: list[Counter[str]] = field(default_factory=list)

    def step(self, _: Any = None) -> list[int]:
        self.seen.append(self.read())
        return []

    def between(self, first: int, last: int) -> dict[str, float]:
        """Counted in each step, on average."""
        counted = self.seen[last] - self.seen[first]
        return {name: number / (last - first) for name, number in counted.items()}


Decode = Callable[[Model, Window], None]
"""Decodes with a model, and tells of each step: first of what chooses a prompt's first token."""


def generated(
    prompts: list[list[int]],
    policies: Sequence[Policy] = (),
    *,
    storage: CacheOptions | None = None,
    before: list[int] | None = None,
    **options: Any,
) -> Decode:
    """Tokens that `Engine.generate` decodes. `before` is a prompt from whose keys and values it goes on."""

    def run(model: Model, window: Window) -> None:
        given = GenerationOptions(max_new_tokens=TO_TOKEN + 1, ignore_eos=True, **options)
        tree = None if before is None else PrefixTree(1 << 30)
        generating = engine(model, policies, storage=storage, tree=tree)
        if before is not None:
            generating.generate([before], GenerationOptions(max_new_tokens=1))
        generating.generate(prompts, given, on_tokens=window.step)

    return run


def served(prompts: list[list[int]], policies: Sequence[Policy] = (), *, answers: int = 1) -> Decode:
    """Tokens that a server decodes: rows of prompts that came one by one, with so many answers to each."""

    def run(model: Model, window: Window) -> None:
        options, serving = GenerationOptions(max_new_tokens=TO_TOKEN + 3, ignore_eos=True), engine(model, policies)
        live = Rows(Lanes(model, serving.policies))
        for number, prompt in enumerate(prompts):
            found = prefilled(model, [prompt], policies, num_new=options.max_new_tokens)
            rows = [Row(model, prompt, options, seed=seed) for seed in range(answers)]
            names = [(number, answer) for answer in range(answers)]
            assert found.cache is not None and found.logits_BV is not None
            live.join(names, rows, found.logits_BV, found.cache, [len(prompt)], [0] * answers)
        window.step()
        for _ in range(TO_TOKEN):
            live.step()
            window.step()

    return run


def prefilled(model: Model, prompts: list[list[int]], policies: Sequence[Policy] = (), **options: Any) -> Prefilled:
    """Prompts of which one rank has computed everything."""
    num_new, whole = options.pop("num_new"), ContextPartition(boundaries=(0, max(map(len, prompts))))
    return engine(model, policies, **options).prefill(PrefillPlan(prompts=prompts, partition=whole, num_new=num_new))


def drafted(prompts: list[list[int]]) -> Decode:
    """Tokens that speculation decodes: drafts of three tokens, whichever of them it would take."""

    def run(model: Model, window: Window) -> None:
        longest, cache = max(map(len, prompts)), prefilled(model, prompts, num_new=3 * (TO_TOKEN + 1)).cache
        assert isinstance(cache, KVCache)
        pads = [longest - len(prompt) for prompt in prompts]
        ids, apart = batch_ids(len(pads)), fastest_form(cache, model, pads=pads, num_tokens=longest, apart=True)
        lanes = Lanes.holding(model, ids, apart, pads=pads, num_tokens=longest)
        samplers = [Row(model, prompt, GenerationOptions(), seed=0).sampler for prompt in prompts]
        window.step()
        for _ in range(TO_TOKEN):
            found = lanes.verify({id: [5, 6, 7] for id in ids})
            next_tokens(samplers, torch.stack([logits_CV[-1] for logits_CV in found.values()]))
            window.step()

    return run


Forward = Callable[[int], object]
"""A forward of the tokens from an index on."""


def repeated(prompt: list[int], forward_after: Callable[[Model, list[int]], Forward], *, tokens: int = 1) -> Decode:
    """One forward of so many tokens after the other.

    Args:
        forward_after: prefills a prompt, and returns what is repeated.
    """

    def run(model: Model, window: Window) -> None:
        with torch.inference_mode():
            forward = forward_after(model, prompt)
            window.step()
            for number in range(TO_TOKEN):
                forward(len(prompt) + number * tokens)
                window.step()

    return run


def on_device(model: Model, prompt: list[int]) -> Tensor:
    return torch.tensor([prompt], device=model.device)


def over_slabs(model: Model, prompt: list[int]) -> Forward:
    """Single tokens over slabs as they are: those of families that cannot repeat a step."""
    cache, token = prefilled(model, [prompt], num_new=TO_TOKEN + 1).cache, on_device(model, [7])
    assert isinstance(cache, KVCache)
    forward = forward_over(model, cache, [], pads=[0], prompt_tokens=len(prompt))
    return lambda start: forward(token, start)


def over_a_shard(model: Model, prompt: list[int]) -> Forward:
    """Single tokens as one of several ranks decodes them, of which each stores a part."""
    own, token, num = model.empty_cache(len(prompt) + TO_TOKEN + 1), on_device(model, [7]), len(prompt)
    model.forward(on_device(model, prompt), CausalAttention(own, start=0, pads=[0]), start=0, pads=[0])
    shard = Shard(chunk=range(num), num_tokens=num, is_own=(True,) * TO_TOKEN)
    part = fastest_form(KVCache(own.slabs, ShardIndex(shard, model.device)), model, pads=[0], num_tokens=num)
    cache = part.over_ranks(LoneGathering(ranks_of(model), [0]))
    forward = forward_over(model, cache, [], pads=[0], prompt_tokens=num)
    return lambda start: forward(token, start)


def in_turn(model: Model, prompt: list[int]) -> Forward:
    """A turn of four given tokens over keys and values in few bits, which attend one after the other."""
    cache, turn = (
        prefilled(model, [prompt], storage=BITS[4], num_new=4 * TO_TOKEN).cache,
        on_device(model, [5, 6, 7, 8]),
    )
    assert cache is not None
    return lambda start: forward_one_by_one(model, cache, [], turn, start=start, pads=[0])


def in_a_chunk(model: Model, prompt: list[int]) -> Forward:
    """A chunk of 64 tokens of a prompt, after what was computed before."""
    cache, chunk, start = model.empty_cache(len(prompt) + 64), on_device(model, ids(64, seed=3)), len(prompt)
    model.forward(on_device(model, prompt), CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
    return lambda _: model.forward(chunk, CausalAttention(cache, start=start, pads=[0]), start=start, pads=[0])


BITS = {bits: CacheOptions(bits=bits, residual=32) for bits in (4, 2)}
SNAPKV = SnapKV(budget=40, window=8)
ADAKV = AdaKV(scorer=SNAPKV)

DROPPING: dict[str, dict[str, Any]] = {
    "window": {"budget": 40},
    "streaming_llm": {"budget": 40, "evict_every": 4},
    "h2o": {"budget": 40, "evict_every": 4},
    "snapkv": {"budget": 40, "window": 8},
    "pyramidkv": {"budget": 40, "window": 8},
    "keydiff": {"budget": 40, "evict_every": 4},
    "tova": {"budget": 40, "evict_every": 4},
    "expected_attention": {"budget": 40, "future_tokens": 8, "evict_every": 4},
    "lagkv": {"budget": 40, "lag": 8, "evict_every": 4},
    "chunkkv": {"budget": 40, "window": 8, "chunk": 4},
    "r_kv": {"budget": 40, "window": 8, "evict_every": 4},
    "kvzip": {"budget": 40},
    "zigzagkv": {"budget": 40, "window": 8},
    "cake": {"budget": 40, "window": 8},
    "scissorhands": {"budget": 40, "recent": 8, "window": 8, "evict_every": 4},
    "keyformer": {"budget": 40, "evict_every": 4},
    "k_centers": {"budget": 40, "evict_every": 4},
    "fastgen": {},
    "minicache": {"start_share": 0.0},
    "pyramidinfer": {"mean_keep": 0.6, "evict_every": 4},
}
"""Policies that drop tokens; some of them after the prompt alone."""

EVENTS = {"gamma": 0.5, "least": 2, "most": 16}
OF_BLOCKS = {"fetch": 40, "sinks": 4, "recent": 16, "observed": 16}

RETRIEVING: dict[str, dict[str, Any]] = {
    "infinigen": {"fetch": 32, "ahead": True, "first_ahead": 1, "first_layer": 1},
    "infinigen, as many as needed": {"alpha": 2.0, "max_fetch": 0.5, "ahead": True, "first_ahead": 1, "first_layer": 1},
    "quest": {"fetch": 32},
    "quest, late": {"fetch": 32, "late": 1.0},
    "shadowkv": {"fetch": 36},
    "sparq": {"fetch": 32},
    "magicpig": {"fetch": 32, "tables": 20, "bits": 2, "dense_every": 0, "recent": 16},
    "magicpig, as many as are sampled": {"tables": 20, "bits": 2, "dense_every": 0, "recent": 16},
    "clusterkv": {"fetch": 32},
    "squeezed_attention": {},
    "retroinfer": {},
    "infllm": OF_BLOCKS | {"block": 8},
    "em_llm": OF_BLOCKS | {"events": EVENTS},
    "quest, by events": {"fetch": 32, "events": {"by": "surprise"} | EVENTS},
    "retrieval_attention": {"fetch": 32, "sinks": 4, "recent": 16, "width": 8, "hops": 4},
    "exact_topk": {"fetch": 32},
    "offload": {},
}
"""Policies that retrieve, which choose slots in every layer from some layer on."""


def ways() -> dict[str, tuple[Decode, int]]:
    """Ways of decoding by name, each with the number of KV heads that it takes, beside 4 query heads."""
    found: dict[str, tuple[Decode, int]] = {}
    for ending, prompts in (("", [ids(80)]), (", padded", [ids(80), ids(60, seed=3), ids(35, seed=4)])):
        found["ungrouped" + ending] = generated(prompts), 4
        found["replayed ungrouped" + ending] = generated(prompts), 4
        found["static" + ending] = generated(prompts), 2
        found["replayed" + ending] = generated(prompts), 2
        found["served" + ending] = served(prompts), 2
        found["served under a policy" + ending] = served(prompts, [SNAPKV]), 2
        found["sampled" + ending] = generated(prompts, do_sample=True, top_p=0.9, repetition_penalty=1.1), 2
        found["drafted" + ending] = drafted(prompts), 2
        for bits, storage in BITS.items():
            found[f"{bits} bits" + ending] = generated(prompts, storage=storage), 2
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
    for length in (512, 4096):
        long, share = [ids(length)], AdaKV(scorer=SnapKV(budget=0.5, window=8))
        found[f"4 bits of {length:,} tokens"] = generated(long, storage=CacheOptions(bits=4)), 2
        few = generated(long, [share], storage=CacheOptions(bits=4))
        found[f"unequal heads in 4 bits of {length:,} tokens"] = few, 2
    found["prefix hit"] = generated([[*ids(80), *ids(8, seed=3)]], before=ids(80)), 2
    for number in (1, 4, 8, 16):
        found[f"{number} joined rows"] = served([ids(80 - row, seed=row) for row in range(number)]), 2
    found["4 padded rows"] = generated([ids(80 - row, seed=row) for row in range(4)]), 2
    found["8 answers of one prompt"] = served([ids(80)], answers=8), 2
    found["slabs"] = repeated(ids(80), over_slabs), 2
    found["sharded"] = repeated(ids(80), over_a_shard), 2
    found["4 tokens in turn, 4 bits"] = repeated(ids(80), in_turn, tokens=4), 2
    found["64 tokens after 128"] = repeated(ids(128), in_a_chunk), 2
    return found


WAYS = ways()
UNDER_POLICIES = [name for name in WAYS if name.split(",")[0] in {*DROPPING, *RETRIEVING}]


KERNELS = "kernels"


def so_far(counts: Counts) -> Counter[str]:
    """Kernels, and waits by place and operation."""
    waits = {f"{place} {operation}": number for (operation, place), number in counts.waits.items()}
    return Counter({KERNELS: counts.kernels.total(), **waits})


@dataclass(frozen=True)
class Asked:
    """Demands on a GPU.

    Attributes:
        kernels: operations of torch on the GPU that neither are views nor only allocate, per layer and step.
        step, prompt: waits of the host by place ("runahead/x.py:12 tolist"), per step, and until a prompt's first
            tokens.
    """

    kernels: float
    step: Mapping[str, float]
    prompt: Mapping[str, float]


def asked_of_gpu(name: str, fuse: Fuse = Fuse.off) -> Asked:
    """Demands of a way of decoding on the virtual GPU. Raises: AssertionError: it copies from pageable memory."""
    decode, num_kv_heads = WAYS[name]
    # Steps that no graph holds, but where it is the graph that is counted.
    is_replayed = name.startswith(("replayed", "served"))
    without_graph = nullcontext() if is_replayed else patch.object(FixedForward, "WARM_UP", 99)
    steps = []
    for num_layers in (FEW_LAYERS, MORE_LAYERS):
        model = llama(num_layers, num_kv_heads, fuse=fuse)
        with counting() as counts, without_graph:
            window = Window(partial(so_far, counts))
            decode(model, window)
        steps.append(window.between(FROM_TOKEN, TO_TOKEN))
        assert not counts.pageable, "these copies wait for memory that is not page-locked"
    few, more = (step.pop(KERNELS, 0) for step in steps)
    before = {place: number for place, number in window.seen[0].items() if place != KERNELS}
    return Asked((more - few) / (MORE_LAYERS - FEW_LAYERS), steps[-1], before)
