"""Cache policies, one file each.

To add one: its file, a line in the table below, a YAML in conf/policy/, a row in the test matrix and a line in
docs/policies.md. A policy is a dataclass; its fields are the options of the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.base import Policy


class PolicyTable(Mapping[str, "type[Policy]"]):
    """Policies by name. The module of a policy is imported when the policy is looked up.

    Args:
        places: module and class by name, as "module:Class".
    """

    def __init__(self, places: dict[str, str]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> type[Policy]:
        if name not in self:
            raise KeyError(f"policy={name} is not one of {', '.join(self)}")
        module, _, policy = self.places[name].partition(":")
        found: type[Policy] = getattr(import_module(module), policy)
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


POLICIES = PolicyTable(
    {
        "full": "policies.full:Full",
        "window": "policies.window:Window",
        "streaming_llm": "policies.streaming_llm:StreamingLLM",
        "h2o": "policies.h2o:H2O",
        "snapkv": "policies.snapkv:SnapKV",
        "pyramidkv": "policies.pyramidkv:PyramidKV",
        "pyramidinfer": "policies.pyramidinfer:PyramidInfer",
        "infinigen": "policies.infinigen:InfiniGen",
        "quest": "policies.quest:Quest",
        "exact_topk": "policies.exact_topk:ExactTopK",
        "offload": "policies.offload:Offload",
    }
)


def __getattr__(name: str) -> Any:
    """A policy by its class, as in `from policies import SnapKV`; imported when it is asked for."""
    for policy, place in POLICIES.places.items():
        if place.endswith(f":{name}"):
            return POLICIES[policy]
    raise AttributeError(f"module 'policies' has no attribute '{name}'")
