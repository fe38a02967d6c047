"""All that is fuzzed."""

from __future__ import annotations

from tests.fuzz import models, options, paths, pml, prompts, requests, tables, tensors
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (prompts, tables, tensors, pml, options, models, paths, requests)
    for target in module.TARGETS
}
