"""Cache policies, one file each.

To add one: its file, a line in the table below, a YAML in conf/policy/, a row in the test matrix and a line in
docs/policies.md. A policy is a dataclass; its fields are the options of the command line.
"""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.base import Budget, LayerPairs, LayerView, ModelFacts, Phase, Policy, PromptPart, Replay, Signals
    from policies.retriever import Choice, Index, PromptView, Retriever, Slots
    from policies.scorer import Scorer

__all__ = [
    "POLICIES",
    "WRAPPERS",
    "Budget",
    "Choice",
    "Index",
    "LayerPairs",
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
]


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
        "lagkv": "policies.lagkv:LagKV",
        "chunkkv": "policies.chunkkv:ChunkKV",
        "r_kv": "policies.r_kv:RKV",
        "kvzip": "policies.kvzip:KVzip",
        "zigzagkv": "policies.zigzagkv:ZigZagKV",
        "kvzap": "policies.kvzap:KVzap",
        "dms": "policies.dms:DMS",
        "scissorhands": "policies.scissorhands:Scissorhands",
        "keyformer": "policies.keyformer:Keyformer",
        "k_centers": "policies.k_centers:KCenters",
        "fastgen": "policies.fastgen:FastGen",
        "razor_attention": "policies.razor_attention:RazorAttention",
        "duo_attention": "policies.duo_attention:DuoAttention",
        "minicache": "policies.minicache:MiniCache",
        "pyramidinfer": "policies.pyramidinfer:PyramidInfer",
        "infinigen": "policies.infinigen:InfiniGen",
        "quest": "policies.quest:Quest",
        "shadowkv": "policies.shadowkv:ShadowKV",
        "sparq": "policies.sparq:SparQ",
        "clusterkv": "policies.clusterkv:ClusterKV",
        "squeezed_attention": "policies.squeezed_attention:SqueezedAttention",
        "retroinfer": "policies.retroinfer:RetroInfer",
        "infllm": "policies.infllm:InfLLM",
        "exact_topk": "policies.exact_topk:ExactTopK",
        "offload": "policies.offload:Offload",
    }
)

WRAPPERS = PolicyTable({"adakv": "policies.adakv:AdaKV", "criticalkv": "policies.criticalkv:CriticalKV"})
"""Policies that choose by the scores of another one, their `scorer`."""


FOR_AUTHORS = ("policies.base", "policies.retriever", "policies.scorer")
"""Modules of what the author of a policy imports from this package: the other names of `__all__`."""


def __getattr__(name: str) -> Any:
    """A policy by its class, as in `from policies import SnapKV`, or what its author needs; imported when asked for."""
    if name in __all__:
        return next(vars(module)[name] for module in map(import_module, FOR_AUTHORS) if name in vars(module))
    for table in (POLICIES, WRAPPERS):
        for policy, place in table.data.items():
            if place.endswith(f":{name}"):
                return table[policy]
    raise AttributeError(f"module 'policies' has no attribute '{name}'")
