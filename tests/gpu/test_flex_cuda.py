"""FlexAttention takes chosen blocks on a GPU if it compiles and its numbers are right there; else they are gathered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput

from runahead import Engine, GenerationOptions, Model, PrefillOptions
from runahead.attention.sparse import blocks, flex
from runahead.config import Attention
from tests.attention.flex_kernel import attend_by_list
from tests.gpu.conftest import HAS_GPU
from tests.gpu.models import CPU, CUDA, alone, ids, model

# Legend: B batch, N query heads, C new tokens, V head dim (value).

SIZES = flex.Sizes(CUDA, torch.bfloat16, 4, 2, 64, 64)
SPARSE = PrefillOptions(attention=Attention.xattention, density=0.4)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Part of the largest logit: some roundings in each layer."""

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    flex.is_right.cache_clear()
    yield
    flex.is_right.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, change: Change = lambda out, lse: (out, lse)) -> list[tuple[int, ...]]:
    """Let the kernel in plain PyTorch be the compiled one of a virtual GPU; returns what shapes it is called with."""
    shapes = list[tuple[int, ...]]()

    def kernel(q_BNCH: Tensor, *rest: Any, **how: Any) -> tuple[Tensor, AuxOutput]:
        shapes.append(tuple(q_BNCH.shape))
        out, aux = attend_by_list(q_BNCH, *rest, **how)
        assert aux.lse is not None
        out, lse = change(out, aux.lse)
        return out, AuxOutput(lse=lse)

    if not HAS_GPU:
        monkeypatch.setattr(flex, "can_compile", lambda: True)
        monkeypatch.setattr(flex, "compiled", lambda: kernel)
    return shapes


@pytest.mark.parametrize("dtype", list(flex.TOLERANCE))
@pytest.mark.parametrize(("heads", "dims"), [((4, 2), (64, 64)), ((3, 3), (128, 64))], ids=["grouped", "values apart"])
def test_it_is_compared_once_and_is_right(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    sizes, shapes = flex.Sizes(CUDA, dtype, *heads, *dims), install(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flex.is_right(sizes)
        calls = len(shapes)
        assert flex.is_right(sizes) and len(shapes) == calls


@pytest.mark.usefixtures("is_virtual")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out, lse: (out * 1.1, lse), "times what rounding allows"),
        (lambda out, lse: (out, lse / 0.6931), "times what rounding allows"),  # of base 2
        (lambda out, lse: (out.flip(1), lse.flip(1)), "times what rounding allows"),
        (lambda out, lse: (out * torch.nan, lse), "inf times what rounding allows"),
        (lambda out, lse: 1 / 0, "division by zero"),
    ],
    ids=["out", "base 2", "heads turned", "NaN", "raises"],
)
def test_one_that_is_wrong_is_left_and_told(monkeypatch: pytest.MonkeyPatch, change: Change, reason: str) -> None:
    install(monkeypatch, change)
    with pytest.warns(UserWarning, match=f"gathered, as FlexAttention cannot be used: .*{reason}"):
        assert not flex.is_right(SIZES)


@pytest.mark.usefixtures("is_virtual")
def test_without_triton_blocks_are_gathered_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not flex.is_right(SIZES) and not flex.is_right(SIZES._replace(device=CPU))


def tokens_of(on: Model, texts: list[list[int]], prefill: PrefillOptions) -> list[Tensor]:
    """The five largest logits of each text's first token, in the order of tokens."""
    asked = GenerationOptions(max_new_tokens=1, ignore_eos=True)
    batch = Engine(on, alone(on.device), prefill=prefill).generate(texts, asked)
    return [torch.tensor([logit for _, logit in each.first_token_logits_top5]) for each in batch.generations]


@pytest.mark.parametrize("by", ["FlexAttention", "gathered blocks"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("lengths", [(700,), (700, 333)], ids=["one row", "padded rows"])
def test_a_gpu_says_what_a_cpu_says(
    monkeypatch: pytest.MonkeyPatch, by: str, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    """In one piece and in two, of which the second one sees blocks of the first; the CPU computes in float32."""
    texts, shapes = [ids(length, seed=length) for length in lengths], install(monkeypatch)
    if by == "gathered blocks":
        monkeypatch.setattr(flex, "can_compile", lambda: False)
        shapes.clear()
    wide = Model(model(CPU, dtype).module.float())
    for chunk_tokens in (None, 512):
        prefill = PrefillOptions(attention=Attention.xattention, density=0.4, chunk_tokens=chunk_tokens)
        found = tokens_of(model(CUDA, dtype), texts, prefill)
        for ours, right in zip(found, tokens_of(wide, texts, prefill), strict=True):
            assert (ours.sort().values - right.sort().values).abs().max() < TOLERANCE[dtype] * right.abs().max()
    assert HAS_GPU or bool(shapes) == (by == "FlexAttention")


@pytest.mark.usefixtures("is_virtual")
def test_it_takes_the_place_of_gathered_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a row's padding ends inside a block, of which else all scores are computed."""
    install(monkeypatch)
    for name in ("_attend_to_gathered", "attend_at"):
        monkeypatch.setattr(blocks, name, lambda *given, **how: pytest.fail("gathered or masked"))
    tokens_of(model(CUDA, torch.bfloat16), [ids(500), ids(333)], SPARSE)
