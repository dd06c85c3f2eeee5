"""Scores cost memory linear in the length: nowhere is there a tensor of length by length."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvevict import EvictionCache, patch
from kvevict.policies import H2O, Random, StreamingLLM


class Largest(TorchDispatchMode):
    """Note the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


@pytest.mark.parametrize(
    "policy", [H2O(64, 64), StreamingLLM(4, 124), Random(budget=128)], ids=lambda p: p.name
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_long_prompt_makes_no_tensor_of_length_by_length(
    make_tiny: Any, draw: Any, policy: Any, padded: bool
) -> None:
    n, heads = 4096, 4
    model = make_tiny(0, num_hidden_layers=1, hidden_size=32)
    ids = torch.tensor([draw(n)])
    mask = torch.ones(1, n, dtype=torch.long)
    if padded:
        mask[:, :5] = 0
    with patch(model), torch.no_grad(), Largest() as seen:
        model(ids, attention_mask=mask, cache=EvictionCache(model, policy), logits_to_keep=1)
    assert seen.numel <= 0.15 * heads * n * n


def test_eager_attention_would_show(make_tiny: Any, draw: Any) -> None:
    model = make_tiny(0, num_hidden_layers=1, hidden_size=32, attn_implementation="eager")
    with torch.no_grad(), Largest() as seen:
        model(torch.tensor([draw(1024)]), logits_to_keep=1)
    assert seen.numel >= 4 * 1024 * 1024


def test_a_stream_holds_one_chunk_at_a_time(make_tiny: Any, draw: Any) -> None:
    import kvevict

    model = make_tiny(0, num_hidden_layers=1, hidden_size=32)
    with patch(model), torch.no_grad(), Largest() as seen:
        for policy in (H2O(32, 32), StreamingLLM(4, 60)):
            for _ in kvevict.stream(model, draw(2000), EvictionCache(model, policy), chunk=32):
                pass
    assert seen.numel <= 4 * 32 * (65 + 32) * 2
