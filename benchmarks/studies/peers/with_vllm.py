"""vLLM for CPUs in the study of peers: its engine in this process, step by step, without its tokenizer."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from benchmarks.studies.peers.answering import Answer, run

KV_GIB = 1
"""Room for keys and values: those of 8,192 tokens of SmolLM2 in float32 take 0.35 GiB."""


@contextmanager
def opened(options: Namespace) -> Iterator[tuple[str, Answer]]:
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine's process would poll while others are measured
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    engine = vllm.LLM(
        model=str(options.model),
        dtype=options.form,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=options.room,
        max_num_seqs=1,
    ).llm_engine
    numbers = count()

    def answer(ids: list[int], num_new: int, on_token: Callable[[int], object]) -> None:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        engine.add_request(str(next(numbers)), {"prompt_token_ids": ids}, sampling)
        num_seen = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                for token in tokens[num_seen:]:
                    on_token(token)
                num_seen = len(tokens)

    yield f"vllm {vllm.__version__}", answer


if __name__ == "__main__":
    run(opened)
