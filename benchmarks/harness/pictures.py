"""Colours, markers, dashes and legends that pictures of benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runahead.picture_style import INK

# Okabe and Ito's colours, which colour-blind readers can distinguish; markers and dashes do so within one kind.
BLACK, ORANGE, SKY, GREEN = INK, "#e69f00", "#56b4e9", "#009e73"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
GREY = "#999999"

LineLook = dict[str, Any]
"""Keyword arguments of a line that set its colour, marker and dashes."""

COLOURS = (VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY, GREY)
MARKERS = ("D", "s", "^", "o", "P", "X", "v", "*", "<", "p", ">")
LOOKS: list[LineLook] = [
    {"color": COLOURS[at % 7], "marker": MARKERS[at % 11], "linestyle": ("-", "--", ":")[at // 7 % 3]}
    for at in range(7 * 11)
]
"""Looks of lines in the order in which they are assigned. As 7 and 11 have no common divisor, no pair of colour and
marker comes twice."""


@dataclass(frozen=True)
class Look:
    """Appearance of a variant in all pictures."""

    colour: str
    marker: str
    dashes: str = "-"


def legend(place: Any, **more: Any) -> None:
    """Add a legend to axes or to a figure; `more` are further arguments of matplotlib's `legend`."""
    place.legend(**({"frameon": False, "fontsize": 8.5, "labelcolor": INK} | more))


MOST_COLUMNS = 4
"""Columns of a legend below a figure, or fewer where names are long."""


def legend_below(figure: Any, handles: list[Any]) -> None:
    """Add a legend below the panels of a figure, in as many columns as it is wide enough for."""
    for columns in range(MOST_COLUMNS, 0, -1):
        legend(figure, handles=handles, loc="outside lower left", ncols=columns)
        [*_, added] = figure.legends
        if columns == 1 or added.get_window_extent(figure.canvas.get_renderer()).width <= figure.bbox.width:
            return
        added.remove()
