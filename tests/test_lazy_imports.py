"""Packages export their main class without loading torch before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

NO_TORCH = "import sys; import runahead.failures, runahead.model, runahead.ranks; assert 'torch' not in sys.modules"


def test_importing_a_package_does_not_load_torch() -> None:
    subprocess.run([sys.executable, "-c", NO_TORCH], check=True)


def test_packages_export_their_main_class() -> None:
    from runahead import model, ranks
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks

    assert (model.Model, ranks.Ranks) == (Model, Ranks)
    for package in (model, ranks):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            package.nothing  # noqa: B018
