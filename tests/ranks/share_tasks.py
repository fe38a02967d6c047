"""Tasks of ranks in test_shares.py: top-level functions, since they run in other processes."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import psutil
import torch
from torch import Tensor, nn

from launch.infer import INFER, infer
from policies import POLICIES
from runahead import Engine, GenerationOptions, Model, ModelOptions, PrefillOptions, Ranks, even
from runahead.config import PrefillName
from runahead.model.loading import memory, recipes
from runahead.model.loading.sharing import bytes_of, share_model
from runahead.model.model import load_weights
from runahead.model.parts import local_part
from runahead.model.shares import load_model, shares_of
from runahead.ranks.devices import M_MMAP_THRESHOLD
from runahead.report import MemoryReport
from runahead.thinning.rank_policies import RankPolicies

TENSOR = PrefillOptions(name=PrefillName.tensor)


def shared_model(options: ModelOptions, ranks: Ranks) -> Model:
    """This rank's share, of as many as there are ranks."""
    ranks.arrange(ranks.size)
    return load_model(options, ranks)


def contents(module: nn.Module) -> dict[str, Tensor]:
    """This rank's parts of all parameters, and the buffers, by name; tied ones under each name."""
    parameters = {name: local_part(each) for name, each in module.named_parameters(remove_duplicate=False)}
    return parameters | dict(module.named_buffers())


def differences(ranks: Ranks, options: list[ModelOptions]) -> list[list[str]]:
    """Names of what differs between shares that were loaded as such, and shares of whole models."""
    ranks.arrange(ranks.size)
    shares = shares_of(ranks)
    found = []
    for each in options:
        with patch.object(recipes, "LEAST_BYTES", 1):
            ours = load_weights(each, ranks.device, shares=shares)
        whole = load_weights(each, ranks.device).module
        total = bytes_of(whole)
        share_model(whole, shares.group, ranks.device)
        expected, had = contents(whole), contents(ours.module)
        wrong = [name for name in expected.keys() | had.keys() if not _same(expected.get(name), had.get(name))]
        assert type(ours.module) is type(whole)
        assert ours.memory.weights_bytes == bytes_of(ours.module) <= total
        found.append(sorted(wrong))
    return found


def differences_with_cache(ranks: Ranks, cache: str, options: list[ModelOptions]) -> list[list[str]]:
    with patch.dict(os.environ, {"RUNAHEAD_CACHE": cache}):
        return differences(ranks, options)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def tokens_of_shares(ranks: Ranks, options: ModelOptions, ids: list[int]) -> tuple[list[int], list[int]]:
    """Greedy tokens of the model that `options` name, and the KV heads of this rank's share."""
    model = shared_model(options, ranks)
    batch = Engine(model, ranks, prefill=TENSOR).generate([ids], GenerationOptions(max_new_tokens=6, ignore_eos=True))
    return batch.generations[0].new_token_ids, [shape.num_kv_heads for shape in model.kv_shapes]


def refused_policies(ranks: Ranks, options: ModelOptions, names: list[str]) -> list[str]:
    """Those of these policies, or of steps a+b, that do not run on this rank's share."""
    model, refused = shared_model(options, ranks), []
    for name in names:
        try:
            RankPolicies(last=[POLICIES[step]() for step in name.split("+")]).check(model)
        except ValueError as error:
            assert re.search(r"heads of a|KV head", str(error)) and "ranks.tensor=" in str(error), error
            refused.append(name)
    return refused


def fingerprints(ranks: Ranks, options: ModelOptions) -> tuple[str, str]:
    """Fingerprints of the model in shares, and of the whole model."""
    return shared_model(options, ranks).fingerprint, Model.load(options, ranks.device).fingerprint


def message_of_loading(ranks: Ranks, options: ModelOptions, cache: str | None = None) -> str:
    try:
        with patch.dict(os.environ, {} if cache is None else {"RUNAHEAD_CACHE": cache}):
            shared_model(options, ranks)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def memory_of_loading(ranks: Ranks, options: ModelOptions) -> MemoryReport:
    # Freed tensors go back to the system at once: else each thread that reads weights keeps up to 32 MiB, and chance
    # says which thread reads what.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    model = shared_model(options, ranks)
    assert model.memory is not None
    return model.memory


@contextmanager
def _data_limit(num_bytes: int) -> Iterator[None]:
    """This process may allocate so many more bytes."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def run_program_within(ranks: Ranks, num_bytes: int, overrides: list[str]) -> str:
    """The error of the program, if it may allocate so many bytes; "ok" if it runs."""
    memory.give_back()
    with _data_limit(num_bytes):
        try:
            infer(INFER.compose(overrides), ranks, even)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "ok"
