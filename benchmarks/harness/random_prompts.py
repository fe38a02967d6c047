"""Prompts of measurements: random token ids, as times do not depend on the text."""

from __future__ import annotations

import torch


def random_ids(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random token ids, the same on every rank."""
    generator = torch.Generator().manual_seed(seed + num_tokens)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
