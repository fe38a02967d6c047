"""One rank, for engines under policies."""

from __future__ import annotations

import pytest

from runahead import Ranks, RanksOptions
from runahead.config import Device


@pytest.fixture(scope="package")
def ranks() -> Ranks:
    return Ranks.start(RanksOptions(device=Device.cpu, threads=1))
