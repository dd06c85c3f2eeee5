"""Column sums against eager attention's, also where an unseen key would dominate."""

import pytest
import torch

from kvevict.kernels import library


@pytest.mark.parametrize("loud", [1.0, 1000.0])
def test_a_masked_key_counts_nothing_however_large_its_logit(loud):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 9, 8) for h in (4, 2, 2))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    mask[..., 4:, 2] = False
    k[:, :, 2] = q[:, ::2, 8] * loud  # nobody from 4 on sees key 2, whose logit is huge
    wide = mask.expand(1, 4, 9, 9)
    _, lse = library.attention_lse(q, k, v, 0.5, mask=wide)
    got = library.column_sum(q, k, lse, 0.5, mask=mask.expand(1, 2, 9, 9))
    logits = (q.view(1, 2, 2, 9, 8) @ k[:, :, None].mT * 0.5).masked_fill(
        ~mask[:, :, None], -torch.inf
    )
    want = logits.softmax(-1).sum((2, 3))
    torch.testing.assert_close(got, want)
