"""Search for the split with the earliest first token: the paper's grid, a seeded search, and filling a table."""

from partitioner.options import Method
from partitioner.searches.grid import Grid
from partitioner.searches.seeded import Seeded
from partitioner.searches.strategy import Strategy

STRATEGIES: dict[Method, Strategy] = {Method.seeded: Seeded(), Method.grid: Grid()}
"""By the value of `search.method`."""
