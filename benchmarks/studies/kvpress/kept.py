"""Tokens that kvpress keeps of given prompts; runs in kvpress's environment, which __main__.py makes.

    python -m benchmarks.studies.kvpress.kept REQUEST ANSWER

Both are files of torch.save. REQUEST: {"model": folder, "cases": [{"press", "options", "budget", "rows", "following"},
...]}; `rows` are token ids of prompts, which are padded on the left, `following` as many ids per row that come after
them. ANSWER: per case {"positions": by row, layer and KV head, ascending, negative on padding, "logits": by the mask
that decoding is given, (rows, following, vocabulary)}.
"""

# Legend: B batch, S prompt tokens, m kept slots, H head dim, T tokens after the prompt, V vocabulary.

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from benchmarks.studies.kvpress.presses import masked, press_of, without_chat_template


@torch.inference_mode()
def main() -> None:
    logging.disable_progress_bar()
    request = torch.load(sys.argv[1], weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32, attn_implementation="sdpa")
    without_chat_template(model, str(Path.cwd()))
    wholes: dict[str, DynamicCache] = {}
    torch.save([run(model.eval(), case, wholes) for case in request["cases"]], sys.argv[2])


def run(model: Any, case: dict[str, Any], wholes: dict[str, DynamicCache]) -> dict[str, Any]:
    """Run one batch of prompts through one press. `wholes` caches the full KV caches of prompts."""
    rows = case["rows"]
    longest = max(map(len, rows))
    pads_B = torch.tensor([longest - len(row) for row in rows])
    ids_BS = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask_BS = (torch.arange(longest) >= pads_B[:, None]).long()
    # Positions are given, as by a caller who accounts for padding; a plain forward would count padding.
    prompt = {
        "input_ids": ids_BS,
        "attention_mask": mask_BS,
        "position_ids": (torch.arange(longest) - pads_B[:, None]).clamp_min(0),
        "logits_to_keep": 1,
    }
    if repr(rows) not in wholes:
        wholes[repr(rows)] = DynamicCache()
        model(**prompt, past_key_values=wholes[repr(rows)])
    cache = DynamicCache()
    with press_of(model, case, longest)(model):
        model(**prompt, past_key_values=cache)
    kept = positions(wholes[repr(rows)], cache, pads_B.tolist(), masked(model))
    logits = {}
    for name in ("mask of the prompt", "no mask") if case["following"][0] else ():
        mask = mask_BS if name == "mask of the prompt" else None
        logits[name] = decode(model, deepcopy(cache), torch.tensor(case["following"]), longest - pads_B, mask)
    return {"positions": kept, "logits": logits}


def positions(
    whole: DynamicCache, cache: DynamicCache, pads: list[int], masks: list[list[set[int]]]
) -> list[list[list[list[int]]]]:
    """Positions of kept tokens by row, layer and KV head, found by their keys, which compression does not change.

    Args:
        whole: all keys of the prompts.
        masks: slots whose tokens count as dropped, by layer and KV head; only with one row.
    """
    found: list[list[list[list[int]]]] = [[] for _ in pads]
    for all_of, kept, masks_of in zip(whole.layers, cache.layers, masks, strict=True):
        for row, pad in enumerate(pads):
            heads = []
            for all_SH, kept_mH, mask in zip(all_of.keys[row].numpy(), kept.keys[row].numpy(), masks_of, strict=True):
                slots = {key.tobytes(): slot for slot, key in enumerate(all_SH)}
                assert len(slots) >= len(all_SH) - max(0, pad - 1), "two tokens have the same key"
                heads.append(sorted(slots[key.tobytes()] - pad for at, key in enumerate(kept_mH) if at not in mask))
            found[row].append(heads)
    return found


def decode(model: Any, cache: DynamicCache, following_BT: Tensor, lengths_B: Tensor, mask_BS: Tensor | None) -> Tensor:
    """Logits (B, T, V) after each of the tokens that follow the prompt."""
    logits = []
    for step, ids_B1 in enumerate(following_BT.split(1, dim=1)):
        if mask_BS is not None:
            mask_BS = torch.cat([mask_BS, torch.ones_like(ids_B1)], dim=1)
        output = model(
            input_ids=ids_B1,
            attention_mask=mask_BS,
            position_ids=lengths_B[:, None] + step,
            past_key_values=cache,
        )
        logits.append(output.logits[:, -1])
    return torch.stack(logits, dim=1)


if __name__ == "__main__":
    main()
