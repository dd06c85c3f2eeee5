"""decode against float64: attention over slots in any order, scores, and the victim."""

import pytest
import torch
from torch import Tensor

from kvevict.kernels import reference
from kvevict.kernels.decode import decode, merge_block, split_plan
from kvevict.policies import H2O, StreamingLLM

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
I32, I64 = torch.int32, torch.int64
slow = pytest.mark.slow

# head dim, G, Q, C, dtype, positions, mode, holes, decay, by_age
CASES = [
    (64, 1, 1, 1, F32, I64, "plain", False, 1.0, False),
    (64, 4, 1, 129, F32, I64, "scores", False, 1.0, False),
    (80, 3, 2, 129, F32, I32, "scores", True, 0.9, True),
    (128, 4, 1, 129, F16, I64, "two_queries", True, 1.0, False),
    (64, 3, 3, 63, F32, I64, "two_queries", False, 1.0, False),
    (64, 8, 16, 63, F32, I64, "scores", True, 0.9, False),
    (256, 1, 1, 63, F32, I32, "rope", True, 1.0, False),
    (80, 4, 1, 129, F16, I64, "rope", False, 1.0, True),
    (64, 3, 1, 129, BF16, I64, "scores", True, 1.0, False),
    (64, 1, 2, 63, BF16, I32, "two_queries", True, 1.0, False),
    (64, 4, 1, 63, BF16, I64, "rope", False, 1.0, False),
    (128, 8, 1, 65, F32, I64, "plain", True, 1.0, False),
    pytest.param(256, 8, 2, 129, F32, I64, "two_queries", True, 1.0, False, marks=slow),
    pytest.param(128, 4, 16, 129, BF16, I64, "scores", False, 0.9, False, marks=slow),
    pytest.param(128, 3, 5, 129, F16, I32, "rope", True, 0.99, True, marks=slow),
]


@pytest.fixture
def slots(device):
    """Return a maker of slots in random order: position [B, H, C] and query_position [B, Q]."""
    generator = torch.Generator().manual_seed(2)

    def make(B: int, H: int, C: int, Q: int, holes: bool, dtype=I64) -> tuple[Tensor, Tensor]:
        rows = [torch.randperm(C + 9, generator=generator)[:C] for _ in range(B * H)]
        position = torch.stack(rows).view(B, H, C)
        if holes and C > 1:
            position[torch.rand(B, H, C, generator=generator) < 0.25] = -1
        queries = torch.arange(Q).expand(B, Q) + C + 9 - Q
        if B > 1:
            queries = queries.clone()
            queries[-1, 0] = -1  # a pad query
        return position.to(device, dtype), queries.to(device, dtype).contiguous()

    return make


@pytest.mark.parametrize(
    ("D", "G", "Q", "C", "dtype", "integer", "mode", "holes", "decay", "by_age"), CASES
)
def test_step_agrees_with_float64(
    draw, slots, guarded, plain, agrees, device,
    D, G, Q, C, dtype, integer, mode, holes, decay, by_age,
):  # fmt: skip
    B, H = 2, 2
    q = draw(B, H * G, Q, D, dtype=dtype, heads_last=True)
    k, v = draw(B, H, C, D, dtype=dtype), draw(B, H, C, D, dtype=dtype)
    position, query_position = slots(B, H, C, Q, holes, integer)
    extra = {"sinks": 4, "recent": 11, "evict": True, "by_age": by_age, "decay": decay}
    if mode == "two_queries":
        extra |= {"q_sink": draw(B, H * G, Q, D, dtype=dtype, heads_last=True), "window": C // 2}
    old = draw(B, H, C).abs() if mode in ("scores", "rope") else None
    angle = torch.arange(C + 1)[:, None] * 100.0 ** -torch.linspace(0, 1, D // 2)

    def run(function, wide, queries, keys, values):
        given = {n: t.to(wide) if n == "q_sink" else t for n, t in extra.items()}
        state = {"position": guarded(position)}
        if old is not None:
            state["scores"] = guarded(old.double() if wide == torch.float64 else old)
        if mode == "rope":
            state["rank"] = guarded(reference.slot_rank(position))
            given |= {
                "cos": guarded(angle.cos().to(device)),
                "sin": guarded(angle.sin().to(device)),
            }
        result = function(queries, keys, values, query_position=query_position, **given, **state)
        return result, state

    wide = (t.double() for t in (q, k, v))
    exact, exact_state = run(reference.decode, torch.float64, *wide)
    rough, rough_state = plain(run, reference.decode, dtype, q, k, v)
    empty = (position < 0)[..., None]
    k, v = (guarded(t.masked_fill(empty, torch.nan)) for t in (k, v))
    ours, state = run(decode, dtype, q, k, v)
    assert ours.ran == "triton"
    assert ours.out.dtype == dtype
    agrees(ours.out, exact.out, rough.out)
    agrees(ours.lse, exact.lse, rough.lse)
    assert torch.equal(ours.victim, exact.victim)
    assert torch.equal(state["position"], exact_state["position"])
    if old is not None:
        agrees(state["scores"], exact_state["scores"], rough_state["scores"])
    if mode == "rope":
        assert torch.equal(state["rank"], exact_state["rank"])


def test_scores_of_a_step_sum_to_the_queries_that_count(draw, slots):
    q, k = draw(2, 6, 2, 64), draw(2, 2, 63, 64)
    position, query_position = slots(2, 2, 63, 2, True)
    scores = torch.zeros(2, 2, 63, device=q.device)
    decode(q, k, k, position, query_position, scores=scores)
    # Three heads of a group, two queries; in the second row one of the two is a pad.
    expected = torch.tensor([[6.0, 6.0], [3.0, 3.0]], device=q.device)
    torch.testing.assert_close(scores.sum(-1), expected)


@pytest.mark.parametrize("policy", [H2O(heavy=30, recent=10, sinks=2), StreamingLLM(2, 40)])
def test_victim_is_the_policy_s(draw, slots, policy):
    sinks, recent, _ = policy.extents
    q, k = draw(2, 2, 1, 64), draw(2, 2, 65, 64)
    for holes in (False, True):
        position, query_position = slots(2, 2, 65, 1, holes)
        query_position[:] = 73
        scores = (draw(2, 2, 65).abs() * 4).round() if policy.needs_scores else None
        seen = int(query_position.max()) + 1
        result = decode(
            q * 0, k, k, position, query_position, sinks=sinks, recent=recent, scores=scores
        )
        expected = policy.victim(scores, position, seen)
        assert torch.equal(result.victim, expected)


def test_of_equal_scores_the_older_position_goes_not_the_lower_slot(draw, device):
    position = torch.tensor([[[5, 3, 9, 1]]], device=device)
    scores = torch.tensor([[[7.0, 7.0, 9.0, 8.0]]], device=device)
    result = decode(
        draw(1, 1, 1, 64) * 0, draw(1, 1, 4, 64), draw(1, 1, 4, 64), position,
        torch.tensor([[9]], device=device), scores=scores, recent=2, evict=True,
    )  # fmt: skip
    assert result.victim.item() == 1
    assert position.tolist() == [[[5, -1, 9, 1]]]


def test_full_protection_has_no_victim_and_an_empty_slot_comes_first(draw, device):
    q, k = draw(1, 1, 1, 64), draw(1, 1, 3, 64)
    now = torch.tensor([[2]], device=device)
    for place, victim in (([0, 1, 2], -1), ([0, -1, 2], 1)):
        position = torch.tensor([[place]], device=device)
        result = decode(q, k, k, position, now, recent=3, evict=True)
        assert result.victim.item() == victim
        assert position.tolist() == [[place]]


def test_oldest_outside_the_recent_is_a_candidate(draw, device):
    position = torch.tensor([[[2, 0, 1]]], device=device)
    now = torch.tensor([[2]], device=device)
    k = draw(1, 1, 3, 64)
    result = decode(draw(1, 1, 1, 64), k, k, position, now, recent=2, evict=True)
    assert result.victim.item() == 1
    assert position.tolist() == [[[2, -1, 1]]]


def test_query_that_sees_nothing_gives_zero(draw, device):
    q, k = draw(1, 1, 2, 64), draw(1, 1, 3, 64)
    position = torch.tensor([[[0, 1, 2]]], device=device)
    scores = torch.zeros(1, 1, 3, device=device)
    result = decode(q, k, k, position, torch.tensor([[-1, -1]], device=device), scores=scores)
    assert (result.out == 0).all()
    assert (result.lse == -torch.inf).all()
    assert (scores == 0).all()


@pytest.mark.parametrize("slots_stored", [1, 63, 64, 65, 1025, 131_073])
@pytest.mark.parametrize("programs", [1, 8, 64, 4096])
def test_splits_cover_every_slot_once(programs, slots_stored):
    plan = split_plan(programs, slots_stored, block_n=64, processors=132)
    assert plan.slots % 64 == 0
    assert (plan.splits - 1) * plan.slots < slots_stored <= plan.splits * plan.slots
    assert merge_block(programs) >= 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 17, 64)}, "17 queries: give 1 to 16, or use attention_lse"),
        ({"query_position": torch.zeros(1, 1).int()}, "query_position is torch.int32: give"),
        ({"k": torch.zeros(1, 1, 8, 64)[:, :, ::2]}, "k has strides"),
        ({"evict": True}, "give recent too"),
        ({"rank": torch.zeros(1, 1, 4).int()}, "give all three or none"),
        ({"scores": torch.zeros(1, 1, 4).half()}, "scores is torch.float16: give torch.float32"),
        ({"decay": 1.5}, "decay is 1.5: give a factor"),
    ],
)
def test_refuses_what_it_cannot_serve(change, message):
    given = {
        "q": torch.zeros(1, 2, 1, 64), "k": torch.zeros(1, 1, 4, 64),
        "v": torch.zeros(1, 1, 4, 64), "position": torch.zeros(1, 1, 4).long(),
        "query_position": torch.zeros(1, 1).long(),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        decode(**(given | change))
