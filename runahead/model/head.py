"""The head of a model: logits of the hidden states of a forward, some tokens at a time, by the model's own code."""

# Legend: B batch, C tokens of a forward, T some of them, D model dim, V vocabulary.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policies.precision import widened


class Head:
    """Logits after the layers of a model.

    transformers' forward calls a submodule that has all layers, and makes logits of the last hidden states that it
    returns. Here forward is run again with some of these in place of the submodule, of which nothing is computed.
    So whatever a family does with logits, such as scaling or capping them, is done, and logits need memory for some
    tokens at a time.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._body: PreTrainedModel | None = None
        self._returned: Any = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Context manager in which a forward's hidden states are kept."""

        def keep(body: PreTrainedModel, _: object, returned: Any) -> None:
            if getattr(returned, "last_hidden_state", None) is not None:
                self._body, self._returned = body, returned  # of those inside each other the outermost ends last

        with ExitStack() as hooks:
            for each in self._module.modules():
                if isinstance(each, PreTrainedModel) and each is not self._module:
                    hooks.callback(each.register_forward_hook(keep).remove)
            yield

    @property
    def hidden(self) -> Tensor:
        """The hidden states (B, C, D) that were kept. Raises: ValueError: the model returns none."""
        if self._returned is None:
            kind = self._module.config.model_type
            raise ValueError(f"this {kind} model has no submodule that returns hidden states, of which logits are made")
        hidden_BCD: Tensor = self._returned.last_hidden_state
        return hidden_BCD

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits (B, T, V), in at least float32."""
        body = self._body
        assert body is not None, "a forward was kept"
        before = vars(body).get("forward")
        body.forward = lambda *_, **__: type(self._returned)(last_hidden_state=hidden_BTD)
        try:
            ids_BT = torch.zeros(hidden_BTD.shape[:2], dtype=torch.long, device=hidden_BTD.device)
            with torch.inference_mode():
                logits_BTV: Tensor = self._module(input_ids=ids_BT, use_cache=False).logits
        finally:
            if before is None:
                del body.forward
            else:
                body.forward = before
        assert logits_BTV.shape[:2] == hidden_BTD.shape[:2], (logits_BTV.shape, hidden_BTD.shape)
        return widened(logits_BTV)
