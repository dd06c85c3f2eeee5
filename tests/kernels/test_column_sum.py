"""column_sum against float64: every mask, length, dtype and head shape, and its refusals."""

import pytest
import torch
from torch import Tensor

from kvevict.kernels import reference
from kvevict.kernels.column_sum import column_sum

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
slow = pytest.mark.slow

# head dim, G, M, N, dtype, key mask, ragged, q_lo, accumulate, decay, causal
CASES = [
    (64, 1, 1, 1, F32, "none", False, 0, False, 1.0, True),
    (64, 4, 63, 63, F32, "left", False, 0, True, 1.0, True),
    (80, 3, 63, 129, F32, "holes", True, 5, True, 0.9, True),
    (128, 1, 129, 129, F32, "none", False, 97, False, 1.0, True),
    (256, 1, 33, 65, F32, "dead", True, 0, False, 0.5, False),
    (64, 8, 17, 129, F16, "none", True, 0, True, 1.0, True),
    (128, 4, 1, 129, F16, "holes", False, 0, True, 0.9, True),
    (64, 3, 65, 33, F32, "none", False, 0, False, 1.0, True),
    (64, 1, 63, 129, BF16, "left", True, 31, False, 1.0, True),
    (80, 8, 5, 63, BF16, "none", False, 0, True, 0.9, False),
    pytest.param(64, 4, 129, 129, F16, "left", True, 1, True, 0.99, True, marks=slow),
    pytest.param(128, 3, 63, 129, BF16, "holes", False, 0, False, 1.0, True, marks=slow),
    pytest.param(256, 8, 63, 129, F32, "none", True, 62, True, 1.0, True, marks=slow),
    pytest.param(80, 1, 129, 129, F32, "dead", False, 0, True, 1.0, True, marks=slow),
]


@pytest.mark.parametrize(
    ("D", "G", "M", "N", "dtype", "mask", "ragged", "q_lo", "add", "decay", "causal"), CASES
)
def test_scores_are_the_attention_each_key_received(
    draw, key_mask, guarded, plain, agrees, device,
    D, G, M, N, dtype, mask, ragged, q_lo, add, decay, causal,
):  # fmt: skip
    B, H = 2, 2
    q = draw(B, H * G, M, D, dtype=dtype, heads_last=N % 4 == 1)
    k = draw(B, H, N, D, dtype=dtype)
    masked = key_mask(mask, B, H, N)
    lengths = None
    if ragged:
        lengths = torch.tensor([[N, N // 2], [max(1, N // 3), 1]], device=device)
    options = {"causal": causal, "key_mask": masked, "lengths": lengths}
    lse = reference.attention_lse(q.double(), k.double(), k.double(), **options).lse
    old = draw(B, H, N).abs() if add else None

    def run(function, queries, keys, sums):
        out = None if old is None else guarded(old.to(sums.dtype))
        result = function(queries, keys, sums, q_lo=q_lo, out=out, decay=decay, **options)
        assert out is None or result is out
        return result

    exact = run(reference.column_sum, q.double(), k.double(), lse)
    rough = plain(run, reference.column_sum, q, k, lse.to(dtype))
    # Keys that are masked or behind the stored length may hold anything.
    k = guarded(k.masked_fill(~_real(masked, lengths, B, H, N, device)[..., None], torch.nan))
    ours = run(column_sum, q, k, guarded(lse.float()))
    assert ours.dtype == F32
    agrees(ours, exact, rough)


def _real(mask: Tensor | None, lengths: Tensor | None, B: int, H: int, N: int, device: str):
    real = torch.ones(B, H, N, dtype=torch.bool, device=device)
    if mask is not None:
        real = real & (mask[:, None] if mask.dim() == 2 else mask)
    if lengths is not None:
        real = real & (torch.arange(N, device=device) < lengths[..., None])
    return real


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_query_with_infinite_lse_adds_exactly_nothing(draw, infinity):
    q, k = draw(1, 2, 40, 64), draw(1, 1, 40, 64)
    lse = reference.attention_lse(q, k, k).lse
    padded = lse.clone()
    padded[:, :, :35] = infinity
    torch.testing.assert_close(column_sum(q, k, padded), column_sum(q, k, lse, q_lo=35))
    assert (column_sum(q, k, torch.full_like(lse, infinity)) == 0).all()


def test_chunks_add_up_to_one_pass(draw):
    q, k = draw(1, 3, 70, 64), draw(1, 1, 70, 64)
    lse = reference.attention_lse(q, k, k).lse
    whole = column_sum(q, k, lse, decay=0.95)
    scores = torch.zeros(1, 1, 70, device=q.device)
    for start, stop in ((0, 41), (41, 70)):
        part = scores[:, :, :stop].contiguous()
        column_sum(
            q[:, :, start:stop], k[:, :, :stop], lse[:, :, start:stop].contiguous(),
            out=part, decay=0.95,
        )  # fmt: skip
        scores[:, :, :stop] = part
    torch.testing.assert_close(scores, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lse": torch.zeros(1, 2, 4, dtype=torch.float64)}, "lse is torch.float64: give"),
        ({"lse": torch.zeros(1, 2, 3)}, r"lse has shape \(1, 2, 3\): give \(1, 2, 4\)"),
        ({"k": torch.zeros(1, 3, 4, 64)}, "a multiple of the KV heads"),
        ({"k": torch.zeros(1, 1, 4, 64, dtype=F16)}, "cast both to one dtype"),
        ({"k": torch.zeros(1, 1, 64, 4).mT}, "make the last axis contiguous"),
        ({"q_lo": 9}, "q_lo is 9: give 0 to M = 4"),
        ({"decay": 0.0}, "decay is 0.0: give a factor"),
        ({"key_mask": torch.zeros(1, 4)}, "key_mask is torch.float32: give bool"),
        ({"out": torch.zeros(1, 4, 1).mT[:, :, ::2]}, "out has shape"),
    ],
)
def test_refuses_what_it_cannot_serve(change, message):
    given = {"q": torch.zeros(1, 2, 4, 64), "k": torch.zeros(1, 1, 4, 64)}
    given |= {"lse": torch.zeros(1, 2, 4)} | change
    with pytest.raises(ValueError, match=message):
        column_sum(given.pop("q"), given.pop("k"), given.pop("lse"), **given)
