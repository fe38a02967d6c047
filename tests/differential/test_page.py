"""docs/models.md says of every causal family of transformers what the runtime says of it."""

from __future__ import annotations

import pytest
import transformers

from benchmarks.families.small import CAUSAL_FAMILIES
from benchmarks.families.verdicts import part_of_page, verdict, verdicts_of_page
from tests.differential.cases import PAGE

PAGE_TEXT = PAGE.read_text()
SAMPLE = 8
"""One of so many families is in `make test`."""

pytestmark = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in PAGE_TEXT, reason="the page is of another transformers"
)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if number % SAMPLE == 0 else [pytest.mark.slow])
        for number, family in enumerate(CAUSAL_FAMILIES)
    ],
)
def test_the_page_has_the_verdict_of_a_family(family: str) -> None:
    assert verdicts_of_page(PAGE_TEXT)[family] == verdict(family)


def test_the_page_has_all_families_and_is_written_by_the_command() -> None:
    found = verdicts_of_page(PAGE_TEXT)
    assert sorted(found) == sorted(CAUSAL_FAMILIES)
    assert part_of_page(found, transformers.__version__) in PAGE_TEXT
