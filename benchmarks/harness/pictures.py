"""Colours, markers, dashes and legends that pictures of benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runahead.picture_style import INK

# Okabe and Ito's colours, which colour-blind readers can distinguish; markers and dashes do so within one kind.
BLACK, ORANGE, SKY, GREEN = INK, "#e69f00", "#56b4e9", "#009e73"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"


@dataclass(frozen=True)
class Look:
    """Appearance of a variant in all pictures."""

    colour: str
    marker: str
    dashes: str = "-"


def legend(place: Any, **more: Any) -> None:
    """Add a legend to axes or to a figure; `more` are further arguments of matplotlib's `legend`."""
    place.legend(**({"frameon": False, "fontsize": 8.5, "labelcolor": INK} | more))
