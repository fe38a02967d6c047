"""Search for the split with the earliest first token.

`Grid` (the paper's) and `Seeded` are two strategies to search the split of one prompt over evaluations of its cost.
`table_search` fills a lookup table by one of them, with costs that an evaluator measures on live ranks or simulates.
`refinement` adds lengths to a simulated table. Points, record and progress are the same for all of them.
"""

from partitioner.options import SearchMethod
from partitioner.searches.grid import Grid
from partitioner.searches.seeded import Seeded
from partitioner.searches.strategy import Strategy

STRATEGIES: dict[SearchMethod, Strategy] = {SearchMethod.seeded: Seeded(), SearchMethod.grid: Grid()}
"""Strategies by the value of `search.method`."""
