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


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 17), (64, 130)])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_chunk_held_at_once_gives_what_the_blocks_give(queries, keys, weighted):
    torch.manual_seed(1)
    q = torch.randn(2, queries, 6, 16).transpose(1, 2)  # as a model has it: not contiguous
    k, v = torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)
    weight = torch.rand(queries) if weighted else None
    out, sums = library.attention_sums(q, k, v, 0.3, weight)
    row = torch.arange(keys - queries, keys)
    seen = torch.arange(keys) <= row[:, None]
    logits = (q.double() @ k.double().repeat_interleave(3, 1).mT * 0.3).masked_fill(
        ~seen, -torch.inf
    )
    exact = logits.softmax(-1)
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.double(), exact @ v.double().repeat_interleave(3, 1), **near)
    counted = exact if weight is None else exact * weight.double()[:, None]
    want = counted.sum(2).view(2, 2, 3, keys).sum(2)
    torch.testing.assert_close(sums.double(), want, **near)


@pytest.mark.parametrize("seen_by", ["causal", "mask of a head", "mask of all"])
@pytest.mark.parametrize(
    ("queries", "keys", "q_lo"), [(300, 1100, 0), (700, 700, 130), (3, 513, 0)]
)
def test_sums_over_tiles_of_keys_give_eager_attentions(queries, keys, q_lo, seen_by):
    torch.manual_seed(2)
    q = torch.randn(2, queries, 6, 16).transpose(1, 2)
    k = torch.randn(2, 2, keys, 16)
    row = torch.arange(keys - queries, keys)
    causal = torch.arange(keys) <= row[:, None]  # [Q, N]
    mask = None
    seen = causal.expand(2, 2, queries, keys)
    if seen_by != "causal":
        heads = 2 if seen_by == "mask of a head" else 1
        mask = causal & (torch.rand(2, heads, queries, keys) < 0.7)
        mask[..., 0] = True
        seen = mask.expand(2, 2, queries, keys)
    logits = q.double() @ k.double().repeat_interleave(3, 1).mT * 0.3
    logits = logits.masked_fill(~seen.repeat_interleave(3, 1), -torch.inf)
    got = library.column_sum(
        q, k, logits.logsumexp(-1).float(), 0.3, causal=mask is None, mask=mask, q_lo=q_lo
    )
    want = logits.softmax(-1)[:, :, q_lo:].sum(2).view(2, 2, 3, keys).sum(2)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
