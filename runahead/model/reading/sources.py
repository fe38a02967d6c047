"""Layers that read the keys and values of others, later ones among them, by a model's config: LCKV.

In LCKV (Wu and Tu, ACL 2024, arXiv 2405.10637) most layers have no keys and values, and read those of a layer near the
top. There a token's are known only once it has gone through all layers before, so such a layer sees earlier tokens
alone, never its own. Layers that do so and those up to the one that they read run in several passes over a prompt:
each starts from the same hidden states, and reads what the pass before has stored, the first one zeros. So a pass is
exact for one more token; as many passes as there are tokens are the model itself, as it decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The layer whose keys and values each layer of a model reads.

    Attributes:
        kv_sources: of each layer, the one whose keys and values it reads, as its config has them.
        most_passes: over a prompt.
        hides_own: no layer sees the token itself; else only those that read a later layer do not.
    """

    kv_sources: Sequence[int]
    most_passes: int
    hides_own: bool

    @classmethod
    def from_config(cls, config: Any) -> Reading | None:
        """The layers of a model by its config; None if it does not say whose keys and values they read.

        Raises:
            ValueError: the config contradicts itself. The message has no remedy.
        """
        sources = getattr(config, "kv_sources", None)
        if sources is None:
            return None
        num_layers, passes = int(config.num_hidden_layers), (config.forward_passes, config.backward_passes)
        if len(sources) != num_layers or not all(type(each) is int and 0 <= each < num_layers for each in sources):
            raise ValueError(f"has kv_sources {sources} in its config, which must be a layer for each of {num_layers}")
        if others := sorted({each for each in sources if sources[each] != each}):
            raise ValueError(f"has layers that read layer {others[0]}, which reads layer {sources[others[0]]} itself")
        if not all(type(each) is int and each >= 0 for each in passes) or sum(passes) < 1:
            raise ValueError(
                f"has {passes[0]} forward_passes and {passes[1]} backward_passes in its config: at least 1"
            )
        return cls(kv_sources=list(sources), most_passes=sum(passes), hides_own=bool(config.force_nodiag))

    @cached_property
    def stores(self) -> Sequence[int]:
        """The layers that store keys and values."""
        return sorted(set(self.kv_sources))

    @cached_property
    def numbers(self) -> Mapping[int, int]:
        """Number of each layer in stores and attention: those that store come first."""
        others = (layer for layer, source in enumerate(self.kv_sources) if source != layer)
        return {layer: number for number, layer in enumerate([*self.stores, *others])}

    @cached_property
    def reads_kv_of(self) -> Mapping[int, int]:
        """Number of each layer that reads another one -> that of the other."""
        pairs = enumerate(self.kv_sources)
        return {self.numbers[layer]: self.numbers[source] for layer, source in pairs if source != layer}

    def readers(self, layer: int) -> Sequence[int]:
        """Numbers of the layers that read this one after it has attended."""
        return [self.numbers[each] for each, source in enumerate(self.kv_sources) if source == layer < each]

    @cached_property
    def groups(self) -> Sequence[range]:
        """The layers that run in passes together."""
        found, layer = list[range](), 0
        while layer < len(self.kv_sources):
            last = self.kv_sources[layer]
            if last > layer:
                while (later := max(self.kv_sources[layer : last + 1])) > last:
                    last = later
                found.append(range(layer, last + 1))
            layer = max(layer, last) + 1
        return found
