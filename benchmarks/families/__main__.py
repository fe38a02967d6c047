"""Writes the list of families in docs/models.md.

python -m benchmarks.families

It builds a small model of every causal family of the installed transformers and checks it as a model is checked when it
is loaded, which takes a minute.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import transformers

from benchmarks.families.verdicts import BEGIN, END, all_verdicts, part_of_page
from benchmarks.harness.pages import with_part

PAGE = Path("docs/models.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE, help="page whose list is written")
    page = parser.parse_args().page
    part = part_of_page(all_verdicts(), transformers.__version__)
    page.write_text(with_part(page.read_text(), BEGIN, part, END))
    print(part)


if __name__ == "__main__":
    main()
