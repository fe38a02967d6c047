"""Numbers of examples of property tests: few in `make test`, five times as many in `make test-slow`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

FEW, MANY = 30, 150
"""Examples of a test that does not say how many it has."""


def examples(few: int, **more: Any) -> settings:
    """Settings of a test that has `few` examples in `make test`, and more in proportion in `make test-slow`.

    A number that stays the same would have the second run try the same examples again, since they are derandomised.

    Args:
        more: other settings of hypothesis.
    """
    return settings(max_examples=few * settings().max_examples // FEW, **more)
