"""Answers under kvpress's methods; runs in kvpress's environment.

    python -m benchmarks.studies.kvpress.answered REQUEST

REQUEST is a file of JSON: {"model": folder, "dtype", "device", "threads", "questions": [{"context", "question",
"reference", "new_tokens", "presses"}, ...]}; context, question and reference are token ids, and a press is {"press",
"options", "budget"}, or null for the full cache. Prints a line of JSON for each question and press, in order: the
model's choice before and after each token of the reference, and its loss in nats per token; where the reference is
empty, the tokens that the model generates instead, and no loss; the tokens per head that each layer keeps, bytes, and
seconds.

A press looks at a layer after its attention, and has no effect on the prefill, so one prefill serves all of them by
their own hooks. KVzip, which repeats the prompt afterwards, has a prefill of its own.
"""

# Legend: S prompt tokens, T tokens of a reference, V vocabulary.

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from benchmarks.studies.kvpress.presses import masked, press_of, without_chat_template


@torch.inference_mode()
def main() -> None:
    answers_file, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    logging.disable_progress_bar()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=getattr(torch, request["dtype"]), attn_implementation="sdpa"
    )
    model = model.eval().to(request["device"])
    without_chat_template(model, str(Path.cwd()))
    for question in request["questions"]:
        for told in answers(model, question):
            print(json.dumps(told), file=answers_file, flush=True)


@dataclass
class Prefilled:
    """A context under a press.

    Attributes:
        marks: `masked_key_indices` of each layer's attention: keys that it replaces in later forwards, or None.
    """

    cache: DynamicCache
    marks: list[Any]
    seconds: float


def answers(model: Any, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Answers under each press, in order."""
    context = question["context"]
    presses = [asked and press_of(model, asked, len(context)) for asked in question["presses"]]
    repeats = [asked is not None and asked["press"] == "kvzip" for asked in question["presses"]]
    shared = prefill(model, context, [press for press, alone in zip(presses, repeats, strict=True) if not alone])
    for press, alone in zip(presses, repeats, strict=True):
        yield answer(model, question, prefill_alone(model, context, press) if alone else shared.pop(0))


def prefill(model: Any, context: Sequence[int], presses: Sequence[Any]) -> list[Prefilled]:
    """One prefill under several presses; None keeps everything."""
    if not presses:
        return []
    whole, made = DynamicCache(), [Prefilled(DynamicCache(), [], 0.0) for _ in presses]

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = whole.layers[module.layer_idx]
        for press, own in zip(presses, made, strict=True):
            module.masked_key_indices = None
            own.cache.update(layer.keys, layer.values, module.layer_idx)
            if press is not None:
                press.forward_hook(module, args, kwargs | {"past_key_values": own.cache}, output)
            own.marks.append(module.masked_key_indices)

    for press in presses:
        if press is not None:
            press.post_init_from_model(model)
    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as a press does
        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    began_s = time.perf_counter()
    try:
        model.model(input_ids=torch.tensor([context], device=model.device), past_key_values=whole)
    finally:
        for each in hooks:
            each.remove()
    for own in made:
        own.seconds = time.perf_counter() - began_s
    return made


def prefill_alone(model: Any, context: Sequence[int], press: Any) -> Prefilled:
    """A prefill under one press, as kvpress's pipeline has it."""
    cache, began_s = DynamicCache(), time.perf_counter()
    with press(model):
        model.model(input_ids=torch.tensor([context], device=model.device), past_key_values=cache)
    marks = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    return Prefilled(cache, marks, time.perf_counter() - began_s)


def answer(model: Any, question: dict[str, Any], prefilled: Prefilled) -> dict[str, Any]:
    """Ask after a context, as kvpress's pipeline does; positions go on from the context's."""
    cache, length = prefilled.cache, len(question["context"])
    for layer, marked in zip(model.model.layers, prefilled.marks, strict=True):
        layer.self_attn.masked_key_indices = marked
    began_s = time.perf_counter()
    bytes_of = [(layer.keys.nbytes + layer.values.nbytes, layer.keys.shape[2]) for layer in cache.layers]
    dropped = [sum(map(len, heads)) / len(heads) for heads in masked(model)]
    before_1V = forward(model, cache, question["question"], length)[-1:]
    asked_s = time.perf_counter()
    reference, start = question["reference"], length + len(question["question"])
    if reference:
        along_SV = torch.cat([before_1V, forward(model, cache, reference, start)])
        greedy = along_SV.argmax(dim=-1).tolist()
        nll = torch.nn.functional.cross_entropy(along_SV[:-1], torch.tensor(reference, device=model.device)).item()
    else:
        greedy, nll = generated(model, cache, before_1V, start, question["new_tokens"]), None
    return {
        "greedy": greedy,
        "nll": nll,
        "kept_tokens": [round(slots - masks, 2) for (_, slots), masks in zip(bytes_of, dropped, strict=True)],
        "kv_bytes": sum(num_bytes for num_bytes, _ in bytes_of),
        "full_kv_bytes": sum(num_bytes // slots * length for num_bytes, slots in bytes_of),
        "prefill_s": prefilled.seconds,
        "question_s": asked_s - began_s,
    }


def generated(model: Any, cache: DynamicCache, logits_1V: torch.Tensor, start: int, most: int) -> list[int]:
    """Tokens that the model says greedily, at positions from `start` on, up to an end of text; all of them stay."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    said: list[int] = [int(logits_1V[-1].argmax())]
    while len(said) < most and said[-1] not in ends:
        said.append(int(forward(model, cache, said[-1:], start + len(said) - 1)[-1].argmax()))
    return said


def forward(model: Any, cache: DynamicCache, ids: list[int], start: int) -> torch.Tensor:
    """Logits (T, V) after each of these tokens, which are appended at positions from `start` on."""
    positions_1T = torch.arange(start, start + len(ids), device=model.device)[None]
    ids_1T = torch.tensor([ids], device=model.device)
    logits_TV: torch.Tensor = model(input_ids=ids_1T, past_key_values=cache, position_ids=positions_1T).logits[0]
    return logits_TV


if __name__ == "__main__":
    main()
