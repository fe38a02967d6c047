"""Needs of tests beside Python: a program, root, a kernel that makes networks."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRED = "RUNAHEAD_REQUIRE_ALL"
"""Set to 1, as .ci/run does, where nothing may be missing."""

TEST_KERNELS = "test-kernels"
"""Folder of the user's cache folder in which the kernels stay that tests have built."""


def missing(what: str) -> NoReturn:
    """This machine lacks what a test needs: the test is skipped, or fails where nothing may be missing."""
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{what} ({REQUIRED}=1)", pytrace=False)
    pytest.skip(what)
