"""attention_lse against float64, and its dead rows."""

import pytest
import torch

from kvevict.kernels import reference
from kvevict.kernels.attention_lse import attention_lse

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
slow = pytest.mark.slow

# head dim, G, M, N, dtype, key mask, ragged, causal
CASES = [
    (64, 1, 1, 1, F32, "none", False, True),
    (64, 3, 63, 63, F32, "none", False, True),
    (80, 4, 63, 129, F32, "left", True, True),
    (128, 1, 129, 129, F32, "holes", False, True),
    (256, 1, 33, 65, F32, "dead", True, False),
    (64, 8, 9, 129, F16, "holes", True, True),
    (128, 3, 1, 63, F16, "none", False, True),
    (64, 1, 65, 33, F32, "none", False, True),
    (64, 4, 63, 63, BF16, "left", False, True),
    (80, 1, 33, 129, BF16, "none", True, False),
    pytest.param(64, 8, 129, 129, BF16, "dead", True, True, marks=slow),
    pytest.param(128, 4, 129, 129, F16, "left", False, True, marks=slow),
    pytest.param(256, 3, 63, 129, F32, "holes", True, True, marks=slow),
]


@pytest.mark.parametrize(("D", "G", "M", "N", "dtype", "mask", "ragged", "causal"), CASES)
def test_output_and_log_sum_exp(
    draw, key_mask, guarded, plain, agrees, device, D, G, M, N, dtype, mask, ragged, causal
):
    B, H = 2, 2
    q = draw(B, H * G, M, D, dtype=dtype, heads_last=N % 4 == 1)
    k, v = draw(B, H, N, D, dtype=dtype), draw(B, H, N, D, dtype=dtype)
    masked = key_mask(mask, B, H, N)
    lengths = None
    if ragged:
        lengths = torch.tensor([[N, N // 2], [max(1, N // 3), 0]], device=device).int()
    options = {"causal": causal, "key_mask": masked, "lengths": lengths}
    exact = reference.attention_lse(q.double(), k.double(), v.double(), **options)
    rough = plain(reference.attention_lse, q, k, v, **options)
    unseen = torch.ones(B, H, N, dtype=torch.bool, device=device)
    if masked is not None:
        unseen = ~(masked[:, None] if masked.dim() == 2 else masked).expand(B, H, N)
        k, v = (t.masked_fill(unseen[..., None], torch.nan) for t in (k, v))
    ours = attention_lse(q, guarded(k), guarded(v), **options)
    assert ours.ran == "triton"
    assert ours.out.dtype == dtype
    assert ours.lse.dtype == F32
    agrees(ours.out, exact.out, rough.out)
    agrees(ours.lse, exact.lse, rough.lse)


def test_query_that_sees_nothing_gives_zero_and_minus_infinity(draw, device):
    q, k = draw(1, 1, 4, 64), draw(1, 1, 4, 64)
    mask = torch.tensor([[False, False, True, True]], device=device)
    result = attention_lse(q, k, k, key_mask=mask)
    assert (result.out[0, 0, :2] == 0).all()
    assert (result.lse[0, 0, :2] == -torch.inf).all()
    assert result.lse[0, 0, 2:].isfinite().all()
