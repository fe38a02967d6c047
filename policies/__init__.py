"""Cache policies, one file each.

To add one: its file, a line in the table below, a YAML in conf/policy/, a row in the test matrix and a line in
docs/policies.md. A policy is a dataclass; its fields are the options of the command line.
"""

from __future__ import annotations

from collections import UserDict
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.base import Policy


class PolicyTable(UserDict[str, Any]):
    """Policies by name, made from their places, "module:Class". A module is imported when its policy is looked up."""

    def __getitem__(self, name: str) -> type[Policy]:
        if name not in self:
            raise KeyError(f"policy={name} is not one of {', '.join(self)}")
        policy: type[Policy] = resolve_name(self.data[name])
        return policy

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.data


POLICIES = PolicyTable(
    {
        "full": "policies.full:Full",
        "window": "policies.window:Window",
        "streaming_llm": "policies.streaming_llm:StreamingLLM",
        "h2o": "policies.h2o:H2O",
        "snapkv": "policies.snapkv:SnapKV",
        "pyramidkv": "policies.pyramidkv:PyramidKV",
        "keydiff": "policies.keydiff:KeyDiff",
        "tova": "policies.tova:TOVA",
        "expected_attention": "policies.expected_attention:ExpectedAttention",
        "pyramidinfer": "policies.pyramidinfer:PyramidInfer",
        "infinigen": "policies.infinigen:InfiniGen",
        "quest": "policies.quest:Quest",
        "exact_topk": "policies.exact_topk:ExactTopK",
        "offload": "policies.offload:Offload",
    }
)


def __getattr__(name: str) -> Any:
    """A policy by its class, as in `from policies import SnapKV`; imported when it is asked for."""
    for policy, place in POLICIES.data.items():
        if place.endswith(f":{name}"):
            return POLICIES[policy]
    raise AttributeError(f"module 'policies' has no attribute '{name}'")
