"""The options of launch/bench.py: plain dataclasses that check themselves, like those of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from benchmarks.ttft.variants import VARIANTS, Split
from launch.inputs.options import PartitionName, PartitionOptions, only_outer
from runahead.config import ModelOptions, PrefillOptions, Profile, RanksOptions, choice, not_one_of, require


class Network(Enum):
    """Network between the ranks.

    `given`: the network of the started ranks. `netns`: two network namespaces with a shaped link, made and removed by
    the program, which starts the ranks itself. `inside`: set by `netns` for the ranks that it starts.
    """

    given = "given"
    netns = "netns"
    inside = "inside"


@dataclass(kw_only=True)
class BenchLinkOptions:
    """Shape of the link that bench.network=netns makes; otherwise `gbps` states the rate of the given network.

    Attributes:
        gbps: rate in 1e9 bits per second, or a list of rates to run one after the other.
        compute_share: alternative to `gbps`: the rate at which sending the KV cache of the whole prompt once takes this
            share of TTFT(p), the time to first token that compute allows. A list is run one after the other.
        noise: change the rate at random while variants run.
    """

    gbps: Any = None
    compute_share: Any = None
    noise: bool = False

    def __post_init__(self) -> None:
        self.gbps = _numbers("link.gbps", self.gbps)
        self.compute_share = _numbers("link.compute_share", self.compute_share)


@dataclass(kw_only=True)
class BenchOptions:
    """Variants and lengths to measure, and files for the results.

    Attributes:
        variants: names in `benchmarks.ttft.variants.VARIANTS`; they run in turn (A B C A B C).
        lengths: prompt lengths in tokens.
        pairs: number of rounds, in each of which every variant runs once. 0 only prints the bounds.
        warmup: runs of each variant and length before the rounds.
        results: file of JSON lines to append to.
        resume: skip rounds that the file already has for the same code, machine and options. Off by default, since a
            benchmark that is started again is usually meant to be measured again. Together with link.compute_share give
            a file with `compute` too, since otherwise the rates differ slightly.
        dirty: append to a file in benchmarks/results also what code with uncommitted changes has measured.
        compute: JSON file with the measured compute of a rank: read if it is for this model, device and longest
            prompt, else measured and written.
        probe_repeats: runs per point of that measurement.
        strict: end if exact variants choose different first tokens. In 16 bits rounding may decide between close
            logits, as those of random weights are.
    """

    variants: list[str] = field(default_factory=lambda: ["single", "kvr_s", "zigzag", "tsp"])
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096])
    pairs: int = 5
    warmup: int = 1
    results: str = "benchmarks/results/bench.jsonl"
    resume: bool = False
    dirty: bool = False
    compute: str | None = None
    probe_repeats: int = 3
    strict: bool = True
    network: Network = Network.given

    def __post_init__(self) -> None:
        self.network = choice("bench.network", Network, self.network)
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown:
            raise ValueError(f"bench.variants has {unknown[0]}, which {not_one_of(unknown[0], VARIANTS)}")
        if not self.variants or len(set(self.variants)) < len(self.variants):
            names = ",".join(self.variants)
            raise ValueError(f"bench.variants=[{names}] must name at least one variant, and each only once")
        shortest = min(self.lengths, default=0)
        require(shortest >= 2, "bench.lengths", self.lengths, "must be a list of whole numbers of at least 2")
        self.lengths = sorted(set(self.lengths))
        for name, least in (("pairs", 0), ("warmup", 0), ("probe_repeats", 1)):
            value = getattr(self, name)
            require(value >= least, f"bench.{name}", value, f"must be at least {least}")


@dataclass(kw_only=True)
class ChainOptions:
    """Options that all variants of KV-Runahead share; see `PrefillOptions`."""

    layers_in_flight: int = 3

    def __post_init__(self) -> None:
        PrefillOptions(layers_in_flight=self.layers_in_flight)


@dataclass(kw_only=True)
class BenchRun:
    """Configuration of one run of launch/bench.py."""

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    prefill: ChainOptions = field(default_factory=ChainOptions)
    link: BenchLinkOptions = field(default_factory=BenchLinkOptions)
    bench: BenchOptions = field(default_factory=BenchOptions)
    profile: Profile = Profile.none

    def __post_init__(self) -> None:
        self.profile = only_outer(self.profile)
        rule = "has no use: ranks have the whole model here, but for the variant tensor; leave it out"
        require(self.ranks.tensor == 1, "ranks.tensor", self.ranks.tensor, rule)
        if self.bench.network is Network.netns:
            if not (self.link.gbps or self.link.compute_share):
                raise ValueError("bench.network=netns needs link.gbps=<1e9 bits per second> or link.compute_share=...")
            if self.link.gbps and self.link.compute_share:
                raise ValueError("link.gbps and link.compute_share both choose the rate; give one of them")
            if "plain_transformers" in self.bench.variants:
                raise ValueError(
                    "plain_transformers needs the cores of all ranks in one process; with bench.network=netns each "
                    "rank has a core of its own, so leave it out of bench.variants"
                )
            return
        if self.link.compute_share and self.bench.network is Network.given:
            raise ValueError("link.compute_share is for bench.network=netns, which shapes the link")
        if len(self.link.gbps) > 1:
            raise ValueError(f"link.gbps={self.link.gbps}: a given network has one rate; use bench.network=netns")
        if self.link.noise and self.bench.network is Network.given:
            raise ValueError("link.noise=on is for bench.network=netns, which shapes the link")


def ineffective_settings(run: BenchRun) -> list[str]:
    """One sentence per option that was changed from its default and changes nothing in this run."""
    splits = {VARIANTS[name].split for name in run.bench.variants}
    sentences = []
    chosen = run.partition.name
    uses_table = chosen is PartitionName.table and Split.searched in splits
    if chosen is not PartitionName.auto and Split.given not in splits and not uses_table:
        sentences.append(f"partition={chosen.name} has no effect without kv_runahead among bench.variants")
    if not run.bench.pairs:
        given = [name for name in ("resume", "dirty") if getattr(run.bench, name)]
        sentences += [f"bench.{name} has no effect with bench.pairs=0" for name in given]
    return sentences


def _numbers(option: str, value: Any) -> list[float]:
    """Convert a number or a list of numbers to a list; None gives an empty one."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    try:
        numbers = [float(each) for each in values]
    except (TypeError, ValueError):
        numbers = [0.0]
    are_rates = all(0 < number < math.inf for number in numbers)
    require(are_rates, option, value, "must be a number above 0, or a list such as [10,1,0.1]")
    return numbers
