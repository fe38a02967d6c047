"""Decoding over tensors of fixed shape gives the tokens of decoding over slabs, and a GPU could replay its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from runahead.attention.partial import attend_sequences
from runahead.cache.attention import CausalAttention
from runahead.cache.fixed import in_fixed_shape
from runahead.cache.index import AfterPrefix
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.decoding.forward import FixedForward, forward_over
from runahead.model.model import Model
from runahead.ranks.graphs import Graphs
from runahead.report import RankReport
from tests.families import FAMILIES, VOCAB_SIZE, build

TOKENS, NEW = 11, 6


def prefilled(model: Model, pads: list[int]) -> tuple[KVCache, Tensor]:
    """A cache with a prompt's keys and values, and random following ids (B, NEW)."""
    ids_BS = torch.randint(3, VOCAB_SIZE, (len(pads), TOKENS + NEW), generator=torch.Generator().manual_seed(7))
    cache = model.empty_cache(TOKENS + NEW, batch=len(pads))
    model.forward(ids_BS[:, :TOKENS], CausalAttention(cache, start=0, pads=pads), start=0, pads=pads)
    return cache, ids_BS[:, TOKENS:]


def fixed_shape(cache: KVCache, pads: list[int]) -> KVCache:
    fixed = in_fixed_shape(cache, pads=pads, num_tokens=TOKENS)
    assert fixed is not None
    return fixed


def logits_of(model: Model, pads: list[int], *, fixed: bool) -> Tensor:
    """Logits (NEW, B, V) of the following tokens, one step each."""
    cache, following = prefilled(model, pads)
    over = fixed_shape(cache, pads) if fixed else cache
    forward = forward_over(model, over, [], pads=pads, prompt_tokens=TOKENS)
    return torch.stack(
        [forward(ids_B1, TOKENS + step).clone() for step, ids_B1 in enumerate(following.split(1, dim=1))]
    )


@pytest.mark.parametrize("pads", [[0], [0, 0, 0], [0, 4, 9]], ids=["one row", "rows", "padded rows"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(4)
def test_logits_equal_those_over_slabs(family: str, pads: list[int]) -> None:
    """The forward is told the first step's number in all steps, as a graph that is replayed has it."""
    model = Model(build(family))
    if not model.repeats_steps or (len(set(pads)) > 1 and model.uneven_limit is not None):
        pytest.skip("steps of this family differ in more than ids, positions and stored tokens")
    if in_fixed_shape(prefilled(model, pads)[0], pads=pads, num_tokens=TOKENS) is None:
        pytest.skip("keys and values have different widths")
    expected, actual = (logits_of(model, pads, fixed=fixed) for fixed in (False, True))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_which_families_repeat_their_steps() -> None:
    repeating = {family for family in FAMILIES if Model(build(family)).repeats_steps}
    assert {"llama", "qwen2", "qwen3", "phi", "gemma"} <= repeating
    assert not repeating & {"llama_dynamic_ntk", "phi3_longrope", "bloom", "mpt", "falcon_alibi", "gemma2", "mistral"}


def test_a_cache_of_a_part_of_the_prompt_is_left_as_it_is() -> None:
    model = Model(build("llama"))
    slabs = {
        "a ring": Slabs.empty(model.kv_shapes, batch=1, spans=[(0, 9)] * 3, num_slabs=2, device=model.device),
        "later tokens": Slabs.empty(model.kv_shapes, batch=1, spans=[(2, 9)] * 3, num_slabs=3, device=model.device),
    }
    for what, each in slabs.items():
        num_bytes = each.num_bytes
        assert in_fixed_shape(KVCache(each), pads=[0], num_tokens=8) is None, what
        assert each.num_bytes == num_bytes, what
    own = Slabs.empty(model.kv_shapes, batch=1, spans=[(9, 12)] * 3, num_slabs=3, device=model.device)
    assert in_fixed_shape(KVCache(own, AfterPrefix(slabs["a ring"])), pads=[0], num_tokens=9) is None


@pytest.mark.parametrize("pads", [[0, 0], [0, 4]])
def test_the_bytes_are_those_of_the_slabs(pads: list[int]) -> None:
    cache, _ = prefilled(Model(build("llama")), pads)
    num_bytes, slab = cache.num_bytes, cache.layers[0].slab.slab_TBKX
    fixed = fixed_shape(cache, pads)
    assert fixed.num_bytes == num_bytes and cache.num_bytes == 0
    shares_memory = fixed.layers[0].slab.slab_TBKX.data_ptr() == slab.data_ptr()
    assert shares_memory == (not any(pads)), "only padded rows are moved"
    report = RankReport(rank=0)
    fixed.describe_decoding(report)
    assert report.kv_peak_bytes == num_bytes + (slab.nbytes if any(pads) else 0), "a layer is there twice meanwhile"


class Gpu:
    """An accelerator that captures a step by keeping it, or cannot, or notes that the host has waited."""

    def __init__(self, *, can_capture: bool = True, waits: bool = False) -> None:
        self.can_capture, self.waits = can_capture, waits
        self.num_captures = self.num_replays = 0
        self.graphs = Graphs()

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        waits: list[str] = []
        yield waits
        waits += ["called a synchronizing CUDA operation"] * self.waits

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.num_captures += 1
        if not self.can_capture:
            raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

        def replay() -> Any:
            self.num_replays += 1
            return step()

        return replay


def replayed(gpu: Gpu) -> int:
    """Number of steps that a GPU replays; their logits have to be right, and each is computed once."""
    model = Model(build("llama"))
    expected = logits_of(model, [0], fixed=False)
    cache, following = prefilled(model, [0])
    forward = FixedForward(model, fixed_shape(cache, [0]), num_rows=1)
    with patch.object(forward, "_gpu", gpu), patch.object(model, "forward", wraps=model.forward) as computed:
        for step, ids_B1 in enumerate(following.split(1, dim=1)):
            torch.testing.assert_close(forward(ids_B1, TOKENS + step), expected[step], rtol=1e-9, atol=1e-9)
            assert gpu.num_captures == (0 if gpu.waits else int(step >= FixedForward.WARM_UP))
        assert computed.call_count == NEW
    return gpu.num_replays


def test_one_graph_is_captured_after_the_warm_up(recwarn: pytest.WarningsRecorder) -> None:
    assert replayed(Gpu()) == NEW - FixedForward.WARM_UP - 1
    assert not recwarn


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (Gpu(can_capture=False), "operation not permitted when stream is capturing"),
        (Gpu(waits=True), "called a synchronizing CUDA operation"),
    ],
)
def test_a_step_that_cannot_be_captured_is_told_once_and_computed_once(
    gpu: Gpu, reason: str, recwarn: pytest.WarningsRecorder
) -> None:
    assert replayed(gpu) == 0
    assert [str(warning.message) for warning in recwarn] == [f"decoding runs without a CUDA graph: {reason}"]


@pytest.mark.parametrize("answers", [[0], [1, 0]], ids=["its step waits", "its capture fails"])
def test_no_rank_replays_a_graph_that_another_does_not_have(
    answers: list[int], recwarn: pytest.WarningsRecorder
) -> None:
    told: list[int] = []

    def agreed(cache: KVCache, fine_1: Tensor) -> Tensor:
        told.append(int(fine_1))
        return torch.tensor([min(told[-1], answers[len(told) - 1])])

    gpu = Gpu()
    with patch.object(KVCache, "agreed", agreed):
        model = Model(build("llama"))
        cache, following = prefilled(model, [0])
        forward = FixedForward(model, fixed_shape(cache, [0]), num_rows=1)
        with patch.object(forward, "_gpu", gpu):
            for step, ids_B1 in enumerate(following.split(1, dim=1)):
                forward(ids_B1, TOKENS + step)
    assert told == [1] * len(answers)
    assert (gpu.num_captures, gpu.num_replays) == (len(answers) - 1, 0)
    assert not recwarn, "the other rank says why"


def test_ranks_that_share_a_text_agree_by_their_gathering() -> None:
    class WithOther:
        def __init__(self, other: int) -> None:
            self._other = other

        def __call__(self, own_1: Tensor) -> Tensor:
            return torch.stack([own_1, torch.full_like(own_1, self._other)])

        def await_device(self) -> None: ...

    cache, _ = prefilled(Model(build("llama")), [0])
    fine_1 = torch.ones(1, dtype=torch.long)
    assert cache.agreed(fine_1).tolist() == [1]
    assert cache.over_ranks(WithOther(0)).agreed(fine_1).tolist() == [0]
    assert cache.over_ranks(WithOther(1)).agreed(fine_1).tolist() == [1]


def test_a_rank_without_a_graph_says_so_to_the_others() -> None:
    """One rank may have a kernel for tensors of fixed shape, and another not."""
    told: list[Tensor] = []
    model = Model(build("llama"))
    cache, following = prefilled(model, [0])
    with (
        patch("runahead.decoding.forward.accelerator_for", lambda device: Gpu()),
        patch.object(KVCache, "agreed", lambda cache, fine_1: told.append(fine_1) or fine_1),
    ):
        forward = forward_over(model, cache, [], pads=[0], prompt_tokens=TOKENS)
        for step, ids_B1 in enumerate(following.split(1, dim=1)):
            forward(ids_B1, TOKENS + step)
            assert len(told) == int(step + 1 >= FixedForward.WARM_UP)
    assert told[0].tolist() == [0]


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_gpu_attends_to_all_sequences_in_one_call(sequences: int) -> None:
    """Shapes and operators alone: these tensors hold no values, so the host cannot ask for one."""
    with FakeTensorMode(), patch("torch.cuda.get_device_capability", lambda *_: (9, 0)):
        kv = torch.empty(1, 2, 40 * sequences, 128, device="cuda", dtype=torch.bfloat16)
        counts = {"dtype": torch.int32, "device": "cuda"}
        out, lse = attend_sequences(
            torch.empty(sequences, 8, 64, device="cuda", dtype=torch.bfloat16),
            kv.narrow(-1, 0, 64),
            kv.narrow(-1, 64, 64),
            starts=torch.empty(sequences + 1, **counts),
            used_S=torch.empty(sequences, **counts),
            longest=40,
            scaling=0.125,
        )
        assert out.shape == (sequences, 8, 64) and lse.shape == (sequences, 8)
