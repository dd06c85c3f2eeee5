"""The oracle itself, against torch's attention and against loops written another way."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvevict.kernels import reference
from kvevict.kernels.decode import decode
from kvevict.kernels.write_slot import write_slot


@pytest.fixture
def normal():
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def rotate(x: Tensor, place: Tensor) -> Tensor:
    """Rotate x [..., n, D] to places [..., n] as Llama does."""
    half = x.shape[-1] // 2
    angle = place[..., None] * 50.0 ** -torch.linspace(0, 1, half, dtype=x.dtype)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def test_attention_and_column_sums_are_those_of_a_plain_softmax(normal):
    B, H, G, M, N, D = 2, 2, 3, 7, 11, 16
    q, k, v = normal(B, H * G, M, D), normal(B, H, N, D), normal(B, H, N, D)
    mask = torch.ones(M, N, dtype=torch.bool).tril(N - M)
    wide_k, wide_v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    result = reference.attention_lse(q, k, v)
    torch.testing.assert_close(result.out, sdpa(q, wide_k, wide_v, attn_mask=mask))
    logits = (q @ wide_k.mT / D**0.5).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(result.lse, logits.logsumexp(-1))
    p = logits.softmax(-1).unflatten(1, (H, G)).sum(2)
    torch.testing.assert_close(reference.column_sum(q, k, result.lse), p.sum(2))
    torch.testing.assert_close(reference.column_sum(q, k, result.lse, q_lo=4), p[:, :, 4:].sum(2))
    old, decayed = normal(B, H, N), 0.0
    for i in range(M):
        decayed = (old if i == 0 else decayed) * 0.9 + p[:, :, i]
    got = reference.column_sum(q, k, result.lse, out=old.clone(), decay=0.9)
    torch.testing.assert_close(got, decayed)


def test_two_queries_are_the_in_cache_positions_of_streaming_llm(normal):
    sinks, window, D, now = 3, 8, 16, 40
    stored = torch.tensor([0, 1, 2, *range(now - window, now + 1)])
    raw_k, v, raw_q = normal(1, 1, len(stored), D), normal(1, 1, len(stored), D), normal(1, 2, 1, D)
    rank = torch.arange(len(stored))
    expected = sdpa(rotate(raw_q, rank[-1:]), rotate(raw_k, rank).repeat_interleave(2, 1),
                    v.repeat_interleave(2, 1))  # fmt: skip
    shuffled = torch.randperm(len(stored), generator=torch.Generator().manual_seed(0))
    got = reference.decode(
        rotate(raw_q, torch.tensor([now])), rotate(raw_k, stored)[:, :, shuffled],
        v[:, :, shuffled], stored[shuffled][None, None], torch.tensor([[now]]),
        sinks=sinks, window=window, q_sink=rotate(raw_q, torch.tensor([sinks + window])),
    )  # fmt: skip
    torch.testing.assert_close(got.out, expected)


def test_rank_rotates_raw_keys_by_slot_order(normal):
    D, stored = 16, torch.tensor([9, 0, 30, -1, 4])
    raw_k, q = normal(1, 1, 5, D), normal(1, 1, 1, D)
    rank = reference.slot_rank(stored[None, None])
    assert rank.tolist() == [[[2, 0, 3, -1, 1]]]
    angle = torch.arange(5)[:, None] * 50.0 ** -torch.linspace(0, 1, D // 2, dtype=q.dtype)
    now = torch.tensor([[30]])
    got = reference.decode(
        q, raw_k, raw_k, stored[None, None], now, rank=rank, cos=angle.cos(), sin=angle.sin()
    )
    live = stored >= 0
    expected = sdpa(q, rotate(raw_k, rank[0, 0].clamp(min=0))[:, :, live], raw_k[:, :, live])
    torch.testing.assert_close(got.out, expected)


@pytest.mark.parametrize("rolled", [False, True])
def test_loop_of_steps_keeps_what_a_slow_loop_keeps(device, normal, rolled):
    """H2O token by token: two kernels a step against Python lists and one softmax."""
    heavy, recent, D, steps = 4, 3, 64, 14
    C = heavy + recent + 1
    angle = torch.arange(C + 1)[:, None] * 50.0 ** -torch.linspace(0, 1, D // 2)
    keys, values = torch.zeros(2, 1, 1, C, D, device=device).unbind()
    position = torch.full((1, 1, C), -1, device=device)
    scores = torch.zeros(1, 1, C, device=device)
    rank = torch.full((1, 1, C), -1, dtype=torch.int32, device=device)
    slot = torch.zeros(1, 1, dtype=torch.int64, device=device)
    kept: list[int] = []
    slow: dict[int, float] = {}
    all_k, all_v, all_q = normal(steps, D), normal(steps, D), normal(steps, D) * 2
    for t in range(steps):
        kept.append(t)
        slow[t] = 0.0
        places = torch.arange(len(kept)) if rolled else torch.tensor(kept)
        q = rotate(all_q[t : t + 1], places[-1:])
        p = (rotate(all_k[kept], places) @ q[0] / D**0.5).softmax(0)
        out = p @ all_v[kept]
        for i, weight in zip(kept, p.tolist(), strict=True):
            slow[i] += weight

        k = all_k[t] if rolled else rotate(all_k[t : t + 1], torch.tensor([t]))[0]
        new_k, new_v, new_q = (x.float().view(1, 1, 1, D).to(device) for x in (k, all_v[t], q))
        now = torch.tensor([[t]], device=device)
        order = {"rank": rank} if rolled else {}
        new_rank = torch.tensor([[[len(kept) - 1]]], dtype=torch.int32, device=device)
        write_slot(
            keys, values, position, slot[..., None], new_k, new_v, now, scores=scores,
            **order, **({"new_rank": new_rank} if rolled else {}),
        )  # fmt: skip
        table = {"cos": angle.cos().to(device), "sin": angle.sin().to(device)} if rolled else {}
        result = decode(
            new_q, keys, values, position, now, scores=scores, recent=recent, evict=True,
            **order, **table,
        )  # fmt: skip
        slot = result.victim
        torch.testing.assert_close(result.out.cpu().double()[0, 0, 0], out, rtol=1e-4, atol=1e-5)
        if len(kept) == C:
            kept.remove(min(kept[:-recent], key=lambda i: (slow[i], i)))
        assert sorted(x for x in position.flatten().tolist() if x >= 0) == kept
        if rolled:
            assert torch.equal(rank.cpu(), reference.slot_rank(position.cpu()))
