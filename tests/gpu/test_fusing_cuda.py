"""model.fuse=auto on a GPU: tensors that an allocator puts side by side are no one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from runahead import Conversation, Model
from runahead.config import Fuse
from runahead.model.layers.fusing import is_fused
from tests.gpu.models import CPU, CUDA, ids, model


def logits(model: Model) -> Tensor:
    """Logits (B, V) of a prompt, then of a token."""
    conversation = Conversation(model)
    found = [conversation.feed(torch.tensor([each], device=model.device)) for each in (ids(20), [7])]
    return torch.cat(found).cpu()


def test_weights_of_storages_that_lie_side_by_side_are_moved_together() -> None:
    """A caching allocator fills a block with one tensor after another, here with all weights of a model."""
    plain, module = model(CPU), model(CUDA).module
    sizes = {name: each.nbytes for name, each in module.named_parameters()}
    assert all(size % 512 == 0 for name, size in sizes.items() if "proj" in name), "no gaps between them"
    fused = Model(module, fuse=Fuse.on)
    assert is_fused(module)
    storages = {name: each.untyped_storage().data_ptr() for name, each in module.named_parameters()}
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        assert len({storages[f"model.layers.0.{name}.weight"] for name in names}) == 1
    torch.testing.assert_close(logits(fused), logits(plain), rtol=1e-3, atol=1e-3)
