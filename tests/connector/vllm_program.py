"""vLLM in a process of its own, in the study's environment: answers token ids, with or without the connector.

    {"ids": [[5, 9, ...], ...], "new": 16, "abort_after": [null, 3]}   ->   {"answers": [...], "free_blocks": 99, ...}

Requests of a line go side by side; one with `abort_after` is aborted after so many steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    ranks = options.get("tensor_parallel_size", 1)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    import vllm

    fixed = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False}
    engine = vllm.LLM(**fixed, **options).llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    print(json.dumps({"version": vllm.__version__, "ranks": ranks}), file=answers, flush=True)
    number = 0
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("reset"):
            engine.reset_prefix_cache()
        number = answer(vllm, engine, scheduler, asked, number, answers)


def answer(vllm: Any, engine: Any, scheduler: Any, asked: dict[str, Any], number: int, answers: Any) -> int:
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False)
    preempted: list[str] = []
    preempt = type(scheduler)._preempt_request

    def noted(request: Any, *given: Any, **more: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(scheduler, request, *given, **more)

    scheduler._preempt_request = noted
    names = [str(number + place) for place in range(len(asked["ids"]))]
    for name, ids in zip(names, asked["ids"], strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    after = asked.get("abort_after") or [None] * len(names)
    done: dict[str, dict[str, Any]] = {}
    steps, end = 0, time.monotonic() + asked.get("limit_s", 120.0)
    while engine.has_unfinished_requests() and time.monotonic() < end:
        for name, when in zip(names, after, strict=True):
            if when == steps:
                engine.abort_request([name])
        for output in engine.step():
            if output.finished:
                done[output.request_id] = {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                    "reason": output.outputs[0].finish_reason,
                }
        steps += 1
        time.sleep(0.001)  # as vLLM's own loop does where it waits for a load
    hung = engine.has_unfinished_requests()
    # Aborted loads are reported by later steps, in which nothing is computed.
    core = engine.engine_core.engine_core
    while scheduler.requests and time.monotonic() < end:
        core.step_fn()
        time.sleep(0.002)
    found = {
        "answers": [done.get(name) for name in names],
        "hung": hung,
        "preempted": len(preempted),
        "steps": steps,
        "left": len(scheduler.requests),
        "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }
    print(json.dumps(found), file=answers, flush=True)
    return number + len(names)


if __name__ == "__main__":
    main()
