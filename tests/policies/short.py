"""Options by which a policy does something on a prompt of a few dozen tokens, made from its class."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from policies import POLICIES
from policies.retriever import Retriever


def short_options(name: str) -> dict[str, Any]:
    """Whole numbers of 5 or more as 4, or 3 where they are odd; a policy that retrieves does so in all layers.

    The budget is the test's, and `evict_every` stays. A policy that these do not suit has options of its own in a test.
    """
    kind = POLICIES[name]
    numbers = {each.name: each.default for each in fields(kind) if type(each.default) is int}  # type: ignore[arg-type]
    few = {
        option: 4 - number % 2
        for option, number in numbers.items()
        if number > 4 and option not in ("budget", "evict_every", "fetch")
    }
    return few | ({"min_tokens": 0, "first_layer": 0} if issubclass(kind, Retriever) else {})
