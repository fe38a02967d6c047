"""A GPU says what a CPU says in float32: with every policy, precision, drafter and family.

Prompts go through the engine of launch/infer.py and through conversations. Half precision is compared in
test_fused_kernels_cuda.py.
"""

# Legend: B batch, C new tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from benchmarks.families.small import Sizes, small_config, small_model
from policies import POLICIES
from policies.base import Policy
from policies.retriever import Retriever
from runahead import Conversation, Engine, GenerationOptions, Model, PrefillOptions
from runahead.config import CacheOptions, Speculate
from runahead.decoding.speculative.speculator import Draft
from runahead.thinning.rank_policies import RankPolicies
from tests.differential.cases import right_families
from tests.families import FAMILIES, MARKING, SHARING, build, prompt
from tests.gpu.conftest import HAS_GPU
from tests.gpu.models import CPU, CUDA, alone
from tests.policies import test_matrix, test_retrieval

LENGTHS, CHUNK = (90, 70), 48
"""Tokens of the prompts, and how many of them are computed at a time."""

NEW = 18
"""Generated tokens, more than the 16 after which some policies cut back."""

FEW_NEW = 6
"""Generated tokens where no policy cuts back."""

TOLERANCE = 2e-3
"""Tolerance of log-probabilities: the kernels of two devices add in another order, and the weights here are wide."""

NAMES, EXAMPLES = [*POLICIES], [*FAMILIES, *SHARING, *MARKING]
CLUSTERING = ("clusterkv", "squeezed_attention", "retroinfer", "k_centers")
"""Policies that choose clusters or centres, in which close tokens may change places."""

NOT_IN_FEW_BITS = {"dms": "a model that marks tokens", "minicache": "layers share what they store"}
"""Policies that go without cache.bits, and why."""


def chosen(name: str, *, in_few_bits: bool = False) -> Policy:
    """A policy that does something on these prompts, with options as in the policies' own matrices.

    Args:
        in_few_bits: it keeps more than a group of 32 tokens and the window of exact ones.
    """
    kind = POLICIES[name]
    if issubclass(kind, Retriever):
        return test_retrieval.policy(name, test_retrieval.SOME[name])
    if kind.follows_marks:
        return kind()
    takes_budget = name not in ("fastgen", "minicache", "pyramidinfer")
    return test_matrix.policy(name, 64 if in_few_bits and takes_budget else test_matrix.BUDGET)


@cache
def model_on(device: torch.device, family: str = "llama", num_layers: int | None = None) -> Model:
    """A small model in float32, with the same weights on every device."""
    if family in EXAMPLES:
        sizes: dict[str, Any] = {} if num_layers is None else {"num_hidden_layers": num_layers}
        return Model(build(family, dtype=torch.float32, **sizes).to(device), name=family)
    return Model(small_model(small_config(family, Sizes())).to(device), name=family)


def engine_on(device: torch.device, model: Model, **options: Any) -> Engine:
    """An engine of one rank, which computes prompts in chunks."""
    return Engine(model, alone(device), prefill=PrefillOptions(chunk_tokens=CHUNK), **options)


def prompts_for(model: Model) -> list[list[int]]:
    """Two prompts, of different lengths where the model takes them."""
    lengths = LENGTHS if model.uneven_limit is None else LENGTHS[:1] * 2
    return [prompt(length, seed) for seed, length in enumerate(lengths)]


@dataclass(kw_only=True)
class Said:
    """Tokens of each row, what is kept of them by layer and in how many bytes, and log-probabilities (B, ...)."""

    tokens: list[list[int]]
    kept: list[int]
    kept_bytes: int
    logprobs: Tensor


def require_equal(says: Callable[[torch.device], Said], *, rounds: bool = False) -> Said:
    """Check that a GPU says what a CPU says, and return it.

    Args:
        rounds: a difference in the last place may choose another code or cluster, so that log-probabilities differ by
            more, and on a real GPU half of the rows in their tokens, too.
    """
    cpu, gpu = says(CPU), says(CUDA)
    if rounds and HAS_GPU:
        differences_B = (gpu.logprobs - cpu.logprobs).abs().flatten(1).amax(dim=1)
        rows = zip(gpu.tokens, cpu.tokens, differences_B.tolist(), strict=True)
        equal = [ours == theirs and difference <= TOLERANCE for ours, theirs, difference in rows]
        assert sum(equal) >= len(equal) / 2, (gpu, cpu)
        return gpu
    assert (gpu.tokens, gpu.kept) == (cpu.tokens, cpu.kept)
    torch.testing.assert_close(gpu.logprobs, cpu.logprobs, atol=(5 if rounds else 1) * TOLERANCE, rtol=0)
    return gpu


def said_by_engine(engine: Engine, prompts: list[list[int]], options: GenerationOptions) -> Said:
    batch = engine.generate(prompts, replace(options, ignore_eos=True, logprobs=0))
    [report] = batch.ranks
    return Said(
        tokens=[each.new_token_ids for each in batch.generations],
        kept=report.kept_tokens,
        kept_bytes=report.kv_kept_bytes + report.kv_host_bytes,
        logprobs=torch.tensor([[told.logprob for told in each.logprobs or ()] for each in batch.generations]),
    )


def in_batch(device: torch.device, family: str, policies: RankPolicies, num_new: int = NEW) -> Said:
    """A batch, padded where the model takes it."""
    model = model_on(device, family)
    engine = engine_on(device, model, policies=policies)
    return said_by_engine(engine, prompts_for(model), GenerationOptions(max_new_tokens=num_new))


def in_turns(device: torch.device, family: str, policies: RankPolicies, num_new: int = NEW) -> Said:
    """A batch and a second turn, of which policies see what they kept of the first one."""
    model = model_on(device, family)
    prompts = prompts_for(model)
    longest = max(map(len, prompts))
    pads = [longest - len(ids) for ids in prompts]
    ids_BC = torch.tensor([[0] * pad + ids for pad, ids in zip(pads, prompts, strict=True)])
    conversation = Conversation(model, policies, length=longest + num_new + 10)
    for start in range(0, longest, CHUNK):
        is_last = start + CHUNK >= longest
        conversation.feed(ids_BC[:, start : start + CHUNK], pads=None if start else pads, cut_back=is_last)
    conversation.generate(GenerationOptions(max_new_tokens=num_new, ignore_eos=True))
    kept, kept_bytes = conversation.kept_tokens, conversation.kv_bytes
    logits_BV = conversation.feed(torch.tensor([prompt(5, seed=9)]))
    conversation.generate(GenerationOptions(max_new_tokens=5, ignore_eos=True))
    return Said(
        tokens=conversation.rows,
        kept=kept + conversation.kept_tokens,
        kept_bytes=kept_bytes,
        logprobs=logits_BV.log_softmax(dim=-1).cpu(),
    )


WAYS: dict[str, Callable[..., Said]] = {"batch": in_batch, "turns": in_turns}


def cases(names: Sequence[str], *, quick: Sequence[str], quick_in_turns: Sequence[str]) -> list[ParameterSet]:
    """Each of the names in a batch and in turns; in the slow set but for some."""
    return [
        pytest.param(name, way, marks=[] if name in (quick if way == "batch" else quick_in_turns) else pytest.mark.slow)
        for way in WAYS
        for name in names
    ]


FEW_BITS = ["full", "snapkv", "fastgen", "quest"]
"""Policies whose kinds of memory are enough for the quick set: all tokens, some, unequal heads, and an index."""

QUICK = [*FEW_BITS, "h2o", "adakv", "kvzip", "dms", "minicache", "pyramidinfer", "infinigen", "clusterkv", "offload"]
"""Policies for the quick set, one at least for each way in which tokens are chosen and kept."""


@pytest.mark.parametrize(("name", "way"), cases(NAMES, quick=QUICK, quick_in_turns=["snapkv", "fastgen", "quest"]))
def test_every_policy(name: str, way: str) -> None:
    family = "llama_dms" if POLICIES[name].follows_marks else "llama"
    says = partial(WAYS[way], family=family, policies=RankPolicies.everywhere([chosen(name)]))
    said = require_equal(says, rounds=name in CLUSTERING)
    keeps_all = name in ("full", "minicache") or issubclass(POLICIES[name], Retriever)
    assert way == "turns" or keeps_all == (said.kept == [LENGTHS[0]] * len(said.kept)), "the policy does nothing here"


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(
    ("name", "way"),
    cases([name for name in NAMES if name not in NOT_IN_FEW_BITS], quick=FEW_BITS, quick_in_turns=[]),
)
def test_every_policy_in_few_bits(name: str, way: str, bits: int) -> None:
    """Whole groups of tokens are in few bits; a window of the newest ones is exact."""
    storage = CacheOptions(bits=bits, residual=8, residual_bits=None)

    def says(device: torch.device, storage: CacheOptions | None = storage) -> Said:
        policies = RankPolicies.everywhere([chosen(name, in_few_bits=True)], storage=storage)
        return WAYS[way](device, "llama", policies)

    said = require_equal(says, rounds=True)
    assert way == "turns" or said.kept_bytes < says(CPU, None).kept_bytes, "nothing is in few bits"


@pytest.mark.parametrize("name", NOT_IN_FEW_BITS)
def test_no_policy_is_left_out_of_few_bits_without_a_reason(name: str) -> None:
    family = "llama_dms" if POLICIES[name].follows_marks else "llama"
    with pytest.raises(ValueError, match=r"cache\.bits=4"):
        in_batch(CPU, family, RankPolicies.everywhere([chosen(name)], storage=CacheOptions(bits=4)))


DRAFTERS: dict[str, tuple[Speculate, Callable[[torch.device], Draft | None]]] = {
    "lookup": (Speculate.lookup, lambda device: None),
    "model": (Speculate.model, lambda device: Draft(by=model_on(device, num_layers=1))),
    "model, which look-up drafts for": (
        Speculate.model,
        lambda device: Draft(by=model_on(device, num_layers=2), first="lookup"),
    ),
    "kept tokens": (Speculate.policy, lambda device: Draft(by=RankPolicies.everywhere([chosen("snapkv")]))),
    "kept tokens, which a model drafts for": (
        Speculate.policy,
        lambda device: Draft(by=RankPolicies.everywhere([chosen("snapkv")]), first=model_on(device, num_layers=1)),
    ),
    "retrieved tokens": (Speculate.policy, lambda device: Draft(by=RankPolicies.everywhere([chosen("quest")]))),
    "retrieved tokens, which look-up drafts for": (
        Speculate.policy,
        lambda device: Draft(by=RankPolicies.everywhere([chosen("quest")]), first="lookup"),
    ),
}


@pytest.mark.parametrize("do_sample", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "drafts for" in name else []) for name in DRAFTERS]
)
def test_every_drafter(name: str, do_sample: bool) -> None:
    """Two rows, which accept different numbers of drafted tokens. A seed draws others on a GPU than on a CPU."""
    kind, draft = DRAFTERS[name]
    options = GenerationOptions(max_new_tokens=2 * FEW_NEW, do_sample=do_sample, temperature=0.5)
    drafted = replace(options, speculate=kind, speculate_match=1, speculate_always=True)

    def says(device: torch.device, by: Draft | None, how: GenerationOptions) -> Said:
        model = model_on(device)
        prompts = [ids + ids[:40] for ids in prompts_for(model)]
        return said_by_engine(engine_on(device, model, draft=by), prompts, how)

    said = says(CUDA, draft(CUDA), drafted)
    assert said.tokens == says(CUDA, None, options).tokens
    if not do_sample:
        require_equal(lambda device: said if device == CUDA else says(device, draft(device), drafted))


def test_every_kind_of_draft_is_here() -> None:
    assert {kind for kind, _ in DRAFTERS.values()} == {*Speculate} - {Speculate.none}


@pytest.mark.parametrize(
    ("family", "way"),
    cases([*EXAMPLES, *sorted({*right_families()} - {*EXAMPLES})], quick=EXAMPLES[::3], quick_in_turns=["llama"]),
)
def test_every_family(family: str, way: str) -> None:
    try:
        model_on(CPU, family)
    except ImportError as error:  # such as timm, for gemma3n's vision tower
        pytest.skip(f"{family} needs another package: {error}")
    require_equal(lambda device: WAYS[way](device, family, RankPolicies(), FEW_NEW))
