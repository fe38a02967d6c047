"""OpenVINO GenAI in the study of peers: its pipeline with paged attention; optimum-intel converts the model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.studies.peers.answering import Answer, run


def convert(source: Path, made: Path, form: str) -> None:
    """OpenVINO's model and tokenizer, of which the pipeline needs both."""
    import openvino  # type: ignore[import-not-found]
    from openvino_tokenizers import convert_tokenizer  # type: ignore[import-not-found]
    from optimum.intel import OVModelForCausalLM  # type: ignore[import-not-found]
    from transformers import AutoTokenizer

    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, load_in_8bit=form == "int8")
    model.save_pretrained(made)
    both = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), both, strict=True):
        openvino.save_model(part, made / f"openvino_{name}.xml")


@contextmanager
def opened(options: Namespace) -> Iterator[tuple[str, Answer]]:
    import numpy as np
    import openvino
    import openvino_genai as genai  # type: ignore[import-not-found]

    class Streamer(genai.StreamerBase):
        def __init__(self, on_token: Callable[[int], object]) -> None:
            super().__init__()
            self._on_token = on_token

        def write(self, tokens: Any) -> Any:
            for token in tokens if isinstance(tokens, list) else [tokens]:
                self._on_token(token)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    # By default it computes in bfloat16 where the processor can, and stores keys and values in 8 bits.
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    pipeline = genai.LLMPipeline(
        options.model,
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=options.threads,
        ATTENTION_BACKEND="PA",
        **exact,
    )

    def answer(ids: list[int], num_new: int, on_token: Callable[[int], object]) -> None:
        asked = genai.GenerationConfig(max_new_tokens=num_new, ignore_eos=True, do_sample=False)
        pipeline.generate(openvino.Tensor(np.array([ids])), asked, Streamer(on_token))

    yield f"openvino-genai {genai.__version__}", answer


if __name__ == "__main__":
    run(opened, convert)
