"""The newest FlashAttention that is installed for a GPU, in place of torch's own, once its numbers are right there."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.masking_utils import sliding_window_causal_mask_function

from runahead.attention.masks import MaskRule
from runahead.attention.partial import AttentionTerms, attend, attend_sequences, errors, softmax_attention
from runahead.failures import first_line

FA3, FA4 = ("FA3", "flash_attn_interface"), ("FA4", "flash_attn.cute.interface")
FORMS = {9: dict([FA3, FA4]), 10: dict([FA4])}
"""By the major number of a GPU's capability: names that torch registers, best first, and the modules that they need."""

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest error of outputs and log-sum-exps, for inputs of spread 1: a few units in the last place of an output."""


def in_use() -> str:
    """Name of the FlashAttention that has taken the place of torch's own; "" for torch's own."""
    return nn.attention.current_flash_attention_impl() or ""


@functools.cache
def use_newest(device: torch.device) -> str:
    """Compute attention on this GPU by the newest FlashAttention that is installed, from now on.

    One that fails, or whose outputs or log-sum-exps are wrong in the ways in which prefills and decoding call it, gives
    way to torch's own, which a warning tells. One that the program has activated itself is compared alike.

    Returns:
        `in_use`.
    """
    major, _ = torch.cuda.get_device_capability(device)
    own = in_use()
    for name in [own] if own else FORMS.get(major, {}):
        if not own and not _is_installed(FORMS[major][name]):
            continue
        try:
            if not own:
                nn.attention.activate_flash_attention_impl(name)
            if not (farthest := max(apart(device))) < 1:
                raise ValueError(f"it is {farthest:.3g} times what rounding allows from a softmax in float64")
            return in_use()
        except Exception as error:  # of a compiler of kernels, a driver, an interface that has changed
            nn.attention.restore_flash_attention_impl()
            warnings.warn(
                f"{name} is installed, but torch's own FlashAttention is used: {first_line(error)}", stacklevel=3
            )
    return in_use()


def _is_installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def apart(device: torch.device) -> Iterator[float]:
    """Errors of FlashAttention on a GPU, each by what rounding allows; infinite for a NaN.

    Of a chunk's own keys, of those before it, with a window or not, and of sequences whose lengths the device knows.
    """
    generator = torch.Generator().manual_seed(0)
    window = MaskRule(sliding_window_causal_mask_function(90))
    places = (0, slice(0, 300)), (200, slice(200, 300)), (200, slice(0, 200)), (299, slice(0, 300))
    for dtype in TOLERANCE:
        for head_dim in (64, 128):
            q, k, v = (
                torch.randn(2, heads, 300, head_dim, generator=generator).to(device, dtype) for heads in (8, 2, 2)
            )
            for rule in (None, window):
                terms = AttentionTerms(scaling=head_dim**-0.5, rule=rule)
                for start, keys in places:
                    given = q[:, :, start:], k[:, :, keys], v[:, :, keys]
                    found = attend(*given, terms, q_start=start, k_start=keys.start)
                    queries_C, keys_S = torch.arange(start, 300)[:, None], torch.arange(300)[keys]
                    hidden_CS = keys_S > queries_C
                    if rule is not None:
                        hidden_CS |= keys_S <= queries_C - 90
                    yield from _errors(found, softmax_attention(*given, terms.scaling, hidden_CS), dtype)
            yield from _apart_in_sequences(q[0].transpose(0, 1)[:2], k[:1], v[:1], dtype)


def _apart_in_sequences(q_SNH: Tensor, k_1UTH: Tensor, v_1UTH: Tensor, dtype: torch.dtype) -> Iterator[float]:
    """Errors of two queries, each of a sequence, whose keys lie in one memory."""
    starts, used, scaling = (120, 0, 300), (170, 33), q_SNH.shape[-1] ** -0.5
    on_device = [torch.tensor(each, dtype=torch.int32).to(q_SNH.device) for each in (starts, used)]
    out_SNH, lse_SN = attend_sequences(
        q_SNH, k_1UTH, v_1UTH, starts=on_device[0], used_S=on_device[1], longest=200, scaling=scaling
    )
    for row, (first, count) in enumerate(zip(starts, used, strict=False)):
        keys = slice(first, first + count)
        given = q_SNH[None, row, :, None], k_1UTH[:, :, keys], v_1UTH[:, :, keys]
        known = softmax_attention(*given, scaling, torch.zeros(1, count, dtype=torch.bool))
        yield from _errors((out_SNH[None, row, :, None], lse_SN[None, row, :, None]), known, dtype)


def _errors(found: tuple[Tensor, Tensor], known: tuple[Tensor, Tensor], dtype: torch.dtype) -> Iterator[float]:
    return (error / TOLERANCE[dtype] for error in errors(found, known))
