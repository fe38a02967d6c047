"""Choice of the pictures of a lookup table, and their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from partitioner.table.fingerprint import link_text
from partitioner.table.lookup_table import LookupTable
from runahead.files import write_whole

if TYPE_CHECKING:
    from partitioner.searches.evaluations import SearchResult
    from partitioner.searches.record import SearchRecord
    from partitioner.simulation.cluster import Cluster

MOST_CHUNKS = 4
"""Most chunks whose lengths fit into a picture's title."""


def save_pictures(table: LookupTable, record: SearchRecord, path: Path, *, folder: Path | None = None) -> list[Path]:
    """Draw the pictures of a table.

    Args:
        record: the searches of the table.
        path: the table's file, after which pictures are named.
        folder: folder of the pictures; that of the table by default.

    Returns:
        The files of the pictures.

    Raises:
        OSError: a file cannot be written.
    """
    written = []
    for name, image in pictures(table, record):
        file = (folder or path.parent) / f"{path.stem}.{name}.png"
        write_whole(file, image)
        written.append(file)
    return written


def pictures(table: LookupTable, record: SearchRecord) -> Iterator[tuple[str, bytes]]:
    """Draw all pictures of a table; yields names and PNGs.

    ratios, ttft; boundary: searches over two ranks; grids: the search over three ranks for the longest prompt;
    timeline-p: the simulated prefill with the best split of the longest prompt over p ranks.
    """
    # Imported here, so that a search does not load matplotlib before it begins.
    from partitioner.pictures.searches import boundary_png, grids_png
    from partitioner.pictures.table import ratios_png, ttft_png

    if not table.entries:
        return
    about = table.fingerprint
    subject = _subject(table, about.place, f"{about.backend}, {about.transfer}")
    yield "ratios", ratios_png(table, subject)
    free = {
        (entry.length, entry.ranks): _without_communication(entry.length, record.clusters[entry.ranks])
        for entry in table.entries
        if entry.ranks > 1 and entry.ranks in record.clusters
    }
    # With a causal kernel TTFT(1) / TTFT*(p) is p; ranks count in proportion to their speeds.
    ideal = {ranks: sum(cluster.speed) / cluster.speed[0] for ranks, cluster in record.clusters.items() if ranks > 1}
    yield "ttft", ttft_png(table, subject, free=free, ideal=ideal)
    by_ranks: dict[int, dict[int, SearchResult]] = {}
    for (length, ranks), search in record.trails.items():
        by_ranks.setdefault(ranks, {})[length] = search
    if 2 in by_ranks:
        yield "boundary", boundary_png(by_ranks[2], subject)
    if 3 in by_ranks:
        yield "grids", grids_png(by_ranks[3][max(by_ranks[3])], subject)
    for ranks, cluster in sorted(record.clusters.items()):
        if ranks > 1 and table.entries_for(ranks):
            yield f"timeline-{ranks}", _timeline(table, ranks, cluster)


def _timeline(table: LookupTable, ranks: int, cluster: Cluster) -> bytes:
    from partitioner.simulation.chain import simulate
    from runahead.timeline.picture import timeline_png

    entry = table.entries_for(ranks)[-1]
    simulated = simulate(entry.partition, cluster, record=True)
    chunks = f"{entry.length:,}"
    if ranks <= MOST_CHUNKS:
        chunks = " + ".join(f"{chunk:,}" for chunk in entry.partition.chunk_lengths)
    subject = f"predicted: {chunks} tokens; {_subject(table, table.fingerprint.transfer)}"
    return timeline_png(simulated.spans, ttft_s=simulated.ttft_s, subject=subject)


def _without_communication(length: int, cluster: Cluster) -> float:
    """The paper's practical bound TTFT(p): the same chain with communication that takes no time.

    Then equal work is within a token of the best split, since no rank waits for another.
    """
    from partitioner.searches.equal_work import equal_work
    from partitioner.simulation.chain import simulate

    partition = equal_work(length, cluster.num_ranks, cluster.compute, cluster.speed)
    return simulate(partition, cluster.without_communication()).ttft_s


def _subject(table: LookupTable, *words: str) -> str:
    about = table.fingerprint
    links = [] if about.link is None else [link_text(about.link)]
    return "; ".join([f"{about.name or about.model.type}, {about.dtype}", *words, *links])
