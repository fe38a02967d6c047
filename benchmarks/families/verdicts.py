"""Verdicts on transformers' causal families, by their default configs: which the runtime computes, why not others."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import CONFIG_MAPPING

from benchmarks.families.small import CAUSAL_FAMILIES, Sizes, small_config, small_model
from runahead import Model
from runahead.model.layer_kinds import decoder_config, other_kinds
from runahead.model.loading.quiet import quiet

BEGIN, END = "<!-- python -m benchmarks.families -->", "<!-- end of the families -->"
RIGHT = "right"
NOT_BUILT = "transformers builds no model of its default config"


def verdict(model_type: str) -> str:
    """`RIGHT`, or why models of a family are refused: of its default config, or of a small one like it."""
    try:
        with quiet():
            default = CONFIG_MAPPING[model_type]()
        if kinds := other_kinds(decoder_config(default)):
            return f"has {', '.join(kinds)} layers"
        config = small_config(model_type, Sizes())
        if kinds := other_kinds(decoder_config(config)):
            return f"has {', '.join(kinds)} layers"
        module = small_model(config)
    except ImportError:  # of a package for images, which a text does not need
        return verdict(decoder_config(default).model_type)
    except Exception:  # transformers' own code may raise anything
        return NOT_BUILT
    try:
        Model(module, name=model_type)
    except ValueError as error:
        why = re.sub(rf"^model {re.escape(model_type)} \(\S+\) (is not supported: )?", "", str(error))
        why = re.sub(r" \(transformers [^)]*\)|; use another model$", "", why)  # how far it is off differs by machine
        return why.removesuffix(", which is not supported")
    return RIGHT


def part_of_page(found: Mapping[str, str], version: str) -> str:
    """The list of families in docs/models.md, in Markdown.

    Args:
        found: verdict of each family.
        version: of transformers.
    """
    right = [family for family, why in found.items() if why == RIGHT]
    refused: dict[str, list[str]] = {}
    for family, why in found.items():
        if why != RIGHT:
            refused.setdefault(why, []).append(family)
    rows = [f"| {why} | {', '.join(families)} |" for why, families in sorted(refused.items(), key=_most_first)]
    return "\n".join(
        [
            f"Of the {len(found)} causal families of transformers {version}, {len(right)} are right:",
            "",
            f"{', '.join(right)}.",
            "",
            "The others are refused:",
            "",
            "| why: the model ... | families |",
            "|---|---|",
            *rows,
        ]
    )


def _most_first(row: tuple[str, list[str]]) -> tuple[int, str]:
    why, families = row
    return -len(families), why


def verdicts_of_page(page: str) -> dict[str, str]:
    """The verdict of each family in a page, as `part_of_page` wrote them."""
    part = page.partition(BEGIN)[2].partition(END)[0]
    right = re.search(r"are right:\n\n(.*)\.\n", part)
    assert right is not None, "the page has no list of families"
    found = dict.fromkeys(right[1].split(", "), RIGHT)
    for why, families in re.findall(r"^\| (.*) \| (.*) \|$", part, flags=re.MULTILINE)[1:]:
        found |= dict.fromkeys(families.split(", "), why)
    return dict(sorted(found.items()))


def all_verdicts() -> dict[str, str]:
    """The verdict of every causal family of the installed transformers."""
    return {family: verdict(family) for family in CAUSAL_FAMILIES}
