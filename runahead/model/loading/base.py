"""Interface of a source of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from runahead.config import ModelOptions


@dataclass(kw_only=True)
class LoadedWeights:
    """A loaded model: `module` is in eval mode, on its device, without gradients; `path` is where it came from."""

    module: PreTrainedModel
    tokenizer: Any | None
    name: str
    dtype: torch.dtype
    path: str | None


class Source(Protocol):
    """A module of this package, with the arguments and errors of the functions in `runahead.model.loading`."""

    def load(
        self,
        options: ModelOptions,
        *,
        device: torch.device,
        attn_implementation: str,
        progress: bool,
        ranks_on_host: int,
    ) -> LoadedWeights: ...

    def load_config(self, options: ModelOptions, *, progress: bool) -> Any: ...

    def load_tokenizer(self, options: ModelOptions, *, progress: bool) -> Any | None: ...
