"""A rank of Runahead in the study of peers, with the options of launch/infer.py and their defaults."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.studies.peers.answering import Answer, run
from launch.infer import INFER
from launch.inputs.engine import arrange, load, make_engine
from launch.inputs.partitions import partitioner
from runahead import GenerationOptions, RankPolicies, Ranks


@contextmanager
def opened(options: Namespace) -> Iterator[tuple[str, Answer]]:
    """The engine of a rank, as launch/infer.py makes it for these options."""
    asked = ["model=hf", f"model.path={options.model}", f"ranks.threads={options.threads}", "prompt.random_tokens=1"]
    composed = INFER.compose([*asked, *options.given])
    with Ranks.start(composed.ranks) as ranks:
        arrange(composed, ranks)
        partition = partitioner(composed.partition, ranks)
        model = load(composed, ranks, partition)
        engine, _ = make_engine(
            composed, model, ranks, lambda engine: None, partition=partition, policies=RankPolicies()
        )

        def answer(ids: list[int], num_new: int, on_token: Callable[[int], object]) -> None:
            def on_tokens(step: list[int | None]) -> None:
                [token] = step
                assert token is not None
                on_token(token)

            engine.generate([ids], GenerationOptions(max_new_tokens=num_new, ignore_eos=True), on_tokens=on_tokens)

        yield f"{ranks.size} x {options.threads}", answer


if __name__ == "__main__":
    run(opened)
