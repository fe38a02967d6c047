"""Cache policies, one file each. To add one: a file, a line here, a YAML in conf/policy/, a row in the test matrix."""

from __future__ import annotations

from policies.base import Policy
from policies.exact_topk import ExactTopK
from policies.full import Full
from policies.h2o import H2O
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.pyramidinfer import PyramidInfer
from policies.pyramidkv import PyramidKV
from policies.quest import Quest
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.window import Window

POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "window": Window,
    "streaming_llm": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "pyramidinfer": PyramidInfer,
    "infinigen": InfiniGen,
    "quest": Quest,
    "exact_topk": ExactTopK,
    "offload": Offload,
}
