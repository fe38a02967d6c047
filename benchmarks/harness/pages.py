"""Pages of the documentation that tools write a part of."""

from __future__ import annotations


def with_part(page: str, begin: str, part: str, end: str) -> str:
    """The page with something else between its two marks; as it is where it has none."""
    if begin not in page or end not in page:
        return page
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
