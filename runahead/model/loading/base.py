"""What a source of weights offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from runahead.config import ModelOptions


@dataclass(kw_only=True)
class LoadedWeights:
    """A model ready to run: `module` is in eval mode, on its device, without gradients; `path` is its source."""

    module: PreTrainedModel
    tokenizer: Any | None
    name: str
    dtype: torch.dtype
    path: str | None


class Source(Protocol):
    """A module of this package. Arguments and errors are those of the functions in `runahead.model.loading`."""

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
