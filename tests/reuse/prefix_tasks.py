"""Tasks of ranks in tests of the prefix tree's files."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from runahead import Ranks
from runahead.cache.slabs import KVShape
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.tiers.layer_rows import LostRows

KEY = "a"
SHAPES = [KVShape(num_kv_heads=1, key_dim=width, value_dim=0, dtype=torch.float64) for width in (1, 2)]


def numbers(ids: list[int]) -> list[Tensor]:
    """Keys and values of each layer: a number for each text."""
    values, number = [], 0
    for token in ids:
        number = (31 * number + token + 1) % 1_000_003
        values.append(number)
    column = torch.tensor(values, dtype=torch.float64)[:, None, None]
    return [column.expand(len(ids), 1, shape.key_dim).clone() for shape in SHAPES]


def damage(folder: Path, layer: int) -> None:
    """Change a number of this layer in every file, which only its checksum tells."""
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        end = json.loads(data[8:start])[f"layer.{layer}"]["data_offsets"][1]
        data[start + end - 1] ^= 1
        path.write_bytes(data)


def use(ranks: Ranks, folder: Path, num_texts: int) -> dict[str, int]:
    """Store texts and find some again, by a tree on a folder that other processes use, too.

    Returns:
        tokens that were found, by tier.
    """
    draw = random.Random(ranks.rank)
    tree = PrefixTree(400, host_bytes=200, folder=folder, disk_bytes=20_000)
    tree.open(KEY, SHAPES, torch.device("cpu"))
    texts: list[list[int]] = []
    ranks.barrier("all to begin at once")
    for _ in range(num_texts):
        begin = draw.choice(texts)[: draw.randint(0, 12)] if texts else []
        ids = begin + [draw.randint(0, 3) for _ in range(draw.randint(1, 8))]
        texts = [*texts[-30:], ids]
        hit = tree.match(ids, KEY)
        start = 0
        with suppress(LostRows):  # the other process has removed a file that was about to be read
            for node in hit.nodes:
                end = start + len(node.ids)
                for layer, expected in zip(node.layers_TKX, numbers(ids), strict=True):
                    assert torch.equal(layer, expected[start:end])
                start = end
        hit.release()
        tree.insert(ids, numbers(ids), KEY).release()
    tree.save()
    return {tier.value: num_tokens for tier, num_tokens in tree.found_tokens.items()}
