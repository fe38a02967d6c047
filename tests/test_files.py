"""The lists of files in the README.md of each package are those of its files."""

from __future__ import annotations

import pytest

from tests.files import PACKAGES, ROOT, files_page


@pytest.mark.parametrize("package", PACKAGES)
def test_the_list_of_a_packages_files_has_their_first_lines(package: str) -> None:
    page = (ROOT / package / "README.md").read_text(encoding="utf-8")
    assert page == files_page(package), "write the lists by python -m tests.files"
