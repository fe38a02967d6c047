"""Facts about a run, by the words that users know: each holds, or does not, or is not known yet."""

from __future__ import annotations

from runahead.features.facts.made import Fact
from runahead.features.facts.of_model import OF_MODEL
from runahead.features.facts.of_options import OF_OPTIONS
from runahead.features.facts.of_policies import OF_POLICIES
from runahead.features.facts.of_ranks import OF_RANKS

FACTS: dict[str, Fact] = OF_OPTIONS | OF_POLICIES | OF_MODEL | OF_RANKS
