"""transformers' `generate` in the study of peers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.studies.peers.answering import Answer, run


class Streamer:
    """Receiver of the tokens of `generate`: the prompt first, then one at a time."""

    def __init__(self, on_token: Callable[[int], object]) -> None:
        self._on_token, self._has_prompt = on_token, False

    def put(self, tokens: Any) -> None:
        if self._has_prompt:
            self._on_token(tokens.item())
        self._has_prompt = True

    def end(self) -> None:
        pass


@contextmanager
def opened(options: Namespace) -> Iterator[tuple[str, Answer]]:
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()

    def answer(ids: list[int], num_new: int, on_token: Callable[[int], object]) -> None:
        prompt = torch.tensor([ids])
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            streamer=Streamer(on_token),
        )

    yield f"transformers {transformers.__version__}", answer


if __name__ == "__main__":
    run(opened)
