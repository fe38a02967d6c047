"""Cache policies, one file each.

A policy is a file of this folder, or of experiments/, with a dataclass that says its name: `class SnapKV(Scorer,
name="snapkv")`. That line is all that makes it known; its fields are the options of the command line.
docs/development.md has the steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.base import LayerForm, ModelFacts, Policy, Replay
    from policies.layer_view import LayerView, Phase, PromptPart, Signals, TokenKind
    from policies.options import Budget, budget_tokens, check_budget, require, require_least
    from policies.retriever import Choice, Index, PromptView, Retriever, Slots
    from policies.scorer import Scorer

__all__ = [
    "POLICIES",
    "Budget",
    "Choice",
    "Index",
    "LayerForm",
    "LayerView",
    "ModelFacts",
    "Phase",
    "Policy",
    "PolicyTable",
    "PromptPart",
    "PromptView",
    "Replay",
    "Retriever",
    "Scorer",
    "Signals",
    "Slots",
    "TokenKind",
    "budget_tokens",
    "check_budget",
    "require",
    "require_least",
]


NAMED = re.compile(r'^class (\w+)\(.*\bname="(\w+)"\):', re.MULTILINE)
"""The line that makes a class a policy: its class and name."""


class PolicyTable(Mapping[str, "type[Policy]"]):
    """Policies by name. A file is read for the line that names its policy, and imported when this is looked up.

    Args:
        folders: packages whose files are read, with their folders.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders

    @cached_property
    def places(self) -> dict[str, str]:
        """The place of each policy, "module:Class"; the full cache first, the others by name."""
        found: dict[str, str] = {}
        for package, folder in self._folders.items():
            for path in folder.glob("*.py"):
                for kind, name in NAMED.findall(path.read_text(encoding="utf-8")):
                    place = f"{package}.{path.stem}:{kind}"
                    assert name not in found, f"{found[name]} and {place} have one name"
                    found[name] = place
        return dict(sorted(found.items(), key=lambda item: (item[0] != "full", item[0])))

    def __getitem__(self, name: str) -> type[Policy]:
        if name not in self:
            raise KeyError(f"policy={name} is not one of {', '.join(self)}")
        policy: type[Policy] = resolve_name(self.places[name])
        return policy

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


HERE = Path(__file__).parent
POLICIES = PolicyTable({"policies": HERE, "policies.experiments": HERE / "experiments"})


FOR_AUTHORS = ("policies.base", "policies.layer_view", "policies.options", "policies.retriever", "policies.scorer")
"""Modules of what the author of a policy imports from this package: the other names of `__all__`."""


def __getattr__(name: str) -> Any:
    """A policy by its class, as in `from policies import SnapKV`, or what its author needs; imported when asked for."""
    if name in __all__:
        return next(vars(module)[name] for module in map(import_module, FOR_AUTHORS) if name in vars(module))
    for policy, place in POLICIES.places.items():
        if place.endswith(f":{name}"):
            return POLICIES[policy]
    raise AttributeError(f"module 'policies' has no attribute '{name}'")
