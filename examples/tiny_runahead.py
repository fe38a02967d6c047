"""KV-Runahead in one file: ranks compute uneven chunks of one prompt at the same time, and the logits stay exact.

    torchrun --nproc-per-node=2 examples/tiny_runahead.py

In a causal decoder, all that a token needs of the tokens before it are their keys and values, layer by layer. So a
prompt can be cut into chunks, one per rank: when a rank begins a layer, the rank before it is one layer ahead, and has
made the keys and values of this layer. They travel down a chain, from rank 0 to 1 to 2, and never back. The last rank
ends with the logits of the last token and with all keys and values, so it decodes alone.

Letters at the end of a name are the dims of a tensor: C tokens of a chunk, P of its prefix (all tokens before it),
S = P + C; N query heads, K key-value heads, H head dim, D model dim, V vocabulary.
"""

import os
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

LAYERS, D, N, K, H, HIDDEN, V = 6, 256, 8, 2, 32, 512, 1024
PROMPT_TOKENS, NEW_TOKENS = 1000, 8
torch.set_default_dtype(torch.float64)  # a wrong token would show; in bfloat16 rounding could hide it


def random_weights() -> dict[str, Tensor]:
    """The same weights on every rank: all ranks have the whole model, and split the tokens, not the layers."""
    random = torch.Generator().manual_seed(0)
    shapes = {"embedding": (V, D), "logits": (D, V)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.q": (D, N * H), f"{layer}.k": (D, K * H), f"{layer}.v": (D, K * H)}
        shapes |= {f"{layer}.o": (N * H, D), f"{layer}.up": (D, HIDDEN), f"{layer}.down": (HIDDEN, D)}
    return {name: torch.randn(shape, generator=random) / shape[0] ** 0.5 for name, shape in shapes.items()}


def rotate(x_CNH: Tensor, start: int) -> Tensor:
    """Rotary embedding. A chunk's positions go on where its prefix ends: `start` is all that it needs to know of it."""
    angles = torch.arange(start, start + len(x_CNH))[:, None] * 10_000 ** -(torch.arange(0, H, 2) / H)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x_CNH.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


class Chain:
    """Keys and values from the rank before to the rank after, one message a layer, while both compute."""

    def __init__(self, rank: int, num_ranks: int, start: int) -> None:
        self.next_rank = rank + 1 if rank + 1 < num_ranks else None
        self.cache = [torch.empty(start, 2, K, H) for _ in range(LAYERS)]  # keys and values of all tokens so far
        self.times: list[tuple[float, float]] = []  # when each layer's prefix was needed, and when it was there
        self.sends: list[dist.Work] = []
        # Posted before the first layer, so that no message waits for its receiver. Both sides know the boundaries,
        # hence the shapes: nothing but keys and values is sent.
        self.receives = [dist.irecv(kv, rank - 1, tag=n) for n, kv in enumerate(self.cache)] if rank > 0 else []

    def prefix(self, layer: int) -> Tensor:
        needed = time.monotonic()
        if self.receives:
            self.receives[layer].wait()
        self.times.append((needed, time.monotonic()))
        return self.cache[layer]

    def pass_on(self, layer: int, kv_S2KH: Tensor) -> None:
        self.cache[layer] = kv_S2KH  # kept until it is sent, and on the last rank for decoding
        if self.next_rank is not None:
            self.sends.append(dist.isend(kv_S2KH, self.next_rank, tag=layer))


def forward(weights: dict[str, Tensor], ids_C: Tensor, start: int, chain: Chain) -> Tensor:
    """Logits [C, V] of the tokens from `start` on. `chain` has the keys and values before them, layer by layer."""
    x_CD = F.rms_norm(weights["embedding"][ids_C], (D,))
    for layer in range(LAYERS):
        normed_CD = F.rms_norm(x_CD, (D,))
        q_CNH = rotate((normed_CD @ weights[f"{layer}.q"]).unflatten(-1, (N, H)), start)
        k_CKH = rotate((normed_CD @ weights[f"{layer}.k"]).unflatten(-1, (K, H)), start)
        v_CKH = (normed_CD @ weights[f"{layer}.v"]).unflatten(-1, (K, H))
        # The prefix is waited for only here, after this rank's own projections. Tokens come first in its dims, so it is
        # one contiguous message, and longer by this chunk it is the prefix of the next rank.
        kv_S2KH = torch.cat([chain.prefix(layer), torch.stack([k_CKH, v_CKH], dim=1)])
        chain.pass_on(layer, kv_S2KH)  # before attention: the next rank need not wait for the rest of this layer
        k_KSH, v_KSH = kv_S2KH.permute(1, 2, 0, 3)
        # Token c of the chunk is token `start + c` of the prompt: it sees the whole prefix, and the chunk up to itself.
        visible_CS = torch.ones(len(ids_C), len(kv_S2KH), dtype=torch.bool).tril(start)
        out_NCH = F.scaled_dot_product_attention(q_CNH.transpose(0, 1), k_KSH, v_KSH, visible_CS, enable_gqa=True)
        x_CD = x_CD + out_NCH.transpose(0, 1).flatten(1) @ weights[f"{layer}.o"]
        x_CD = x_CD + F.silu(F.rms_norm(x_CD, (D,)) @ weights[f"{layer}.up"]) @ weights[f"{layer}.down"]
    return F.rms_norm(x_CD, (D,)) @ weights["logits"]


def boundaries(num_tokens: int, num_ranks: int) -> list[int]:
    """Where chunks begin and end, such that all take the same number of multiplications.

    Later tokens attend to more keys, so later chunks are shorter. In a layer, a token takes `linear` multiplications
    with weights and 2 N H with each key before it: the first n tokens take linear n + N H n². (The paper searches the
    split instead: not every multiplication takes as long, and ranks also wait for messages.)
    """
    linear, pairs = D * H * (2 * N + 2 * K) + 2 * D * HIDDEN, N * H
    work = [(linear * num_tokens + pairs * num_tokens**2) * end / num_ranks for end in range(num_ranks + 1)]
    return [round(((linear**2 + 4 * pairs * each) ** 0.5 - linear) / (2 * pairs)) for each in work]


def decode(weights: dict[str, Tensor], logits_V: Tensor, chain: Chain) -> list[int]:
    """The likeliest tokens: the same forward, for a chunk of one token whose prefix is the cache."""
    chain.next_rank, chain.receives, tokens = None, [], []
    while len(tokens) < NEW_TOKENS:
        tokens.append(int(logits_V.argmax()))
        [logits_V] = forward(weights, torch.tensor(tokens[-1:]), PROMPT_TOKENS + len(tokens) - 1, chain)
    return tokens


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --nproc-per-node=2 examples/tiny_runahead.py")
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    weights = random_weights()
    ids = torch.randint(V, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(1))
    ends = boundaries(PROMPT_TOKENS, num_ranks)
    chunks = [ids[start:end] for start, end in pairwise(ends)]

    chain = Chain(rank, num_ranks, ends[rank])
    dist.barrier()  # the times below begin when all ranks are there
    began = time.monotonic()
    logits_CV = forward(weights, chunks[rank], ends[rank], chain)
    for send in chain.sends:
        send.wait()
    waits: list = [None] * num_ranks
    dist.all_gather_object(waits, [[f"{(time - began) * 1e3:5.0f}" for time in layer] for layer in chain.times])
    dist.destroy_process_group()
    if rank < num_ranks - 1:
        return
    print(f"{PROMPT_TOKENS} tokens in chunks of {[len(chunk) for chunk in chunks]}")
    print("when each rank needs the prefix of a layer, and when it is there, in milliseconds:")
    for layer in range(LAYERS):
        print(f"  layer {layer}:", " | ".join(" ".join(wait[layer]) for wait in waits))
    # The last rank computes all again, alone: the chunks one after another, and all tokens at once.
    in_turn, at_once = Chain(0, 1, 0), Chain(0, 1, 0)
    in_turn_CV = [forward(weights, chunk, start, in_turn) for chunk, start in zip(chunks, ends, strict=False)][-1]
    at_once_CV = forward(weights, ids, 0, at_once)[ends[rank] :]
    print("logits are bit by bit those of one rank that computes chunk after chunk:", logits_CV.equal(in_turn_CV))
    print(f"largest difference from one pass over all tokens: {float((logits_CV - at_once_CV).abs().max()):.0e}")
    print("new tokens of the chain:    ", decode(weights, logits_CV[-1], chain))
    print("new tokens of the one pass: ", decode(weights, at_once_CV[-1], at_once))


if __name__ == "__main__":
    main()
