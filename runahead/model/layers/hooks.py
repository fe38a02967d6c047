"""Hooks that a module of a model has once, however often a `Model` is made over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Hook = Callable[..., Any]
"""A hook of PyTorch's that is given keyword arguments; equal to another one that does the same."""


def hook_before(module: nn.Module, hook: Hook, *, first: bool = False) -> None:
    """Call the hook before each forward of a module; `first` before the hooks that it has."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)


def hook_after(module: nn.Module, hook: Hook) -> None:
    """Call the hook after each forward of a module."""
    if hook not in module._forward_hooks.values():
        module.register_forward_hook(hook, with_kwargs=True)
