"""Cache policies, one file each.

To add one: its file, a line in the table below, a YAML in conf/policy/, a row in the test matrix and a line in
docs/policies.md. A policy is a dataclass; its fields are the options of the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.base import Policy


class PolicyTable(Mapping[str, "type[Policy]"]):
    """Policies by name. The module of a policy is imported when the policy is looked up.

    Args:
        places: module and class by name, as "module:Class".
    """

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> type[Policy]:
        if name not in self:
            raise KeyError(f"policy={name} is not one of {', '.join(self)}")
        module, _, policy = self._places[name].partition(":")
        found: type[Policy] = getattr(import_module(module), policy)
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


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
