"""write_slot and fill_holes: exact copies, nothing else touched, any dtype of positions."""

import pytest
import torch

from kvevict.kernels import reference
from kvevict.kernels.fill_holes import fill_holes
from kvevict.kernels.write_slot import write_slot

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def cache(draw, guarded, device):
    """Return a maker of two equal caches, the first with guard regions around every buffer."""

    def make(C: int, D: int, dtype: torch.dtype, integer: torch.dtype, extras: bool):
        generator = torch.Generator().manual_seed(3)
        shape = (2, 3, C)
        state = [
            draw(*shape, D, dtype=dtype),
            draw(*shape, D, dtype=dtype),
            torch.randint(0, 999, shape, generator=generator).to(device, integer),
        ]
        named = {}
        if extras:
            named["scores"] = draw(*shape)
            named["rank"] = torch.randint(0, 99, shape, generator=generator).int().to(device)
        ours = [guarded(t) for t in state], {n: guarded(t) for n, t in named.items()}
        return ours, ([t.clone() for t in state], {n: t.clone() for n, t in named.items()})

    return make


def _equal(ours, theirs) -> bool:
    pairs = [*zip(ours[0], theirs[0], strict=True)]
    pairs += [(t, theirs[1][n]) for n, t in ours[1].items()]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("C", "D", "T", "dtype", "integer", "extras"),
    [
        (1, 64, 1, F32, torch.int64, False),
        (63, 80, 1, F16, torch.int64, True),
        (129, 128, 3, BF16, torch.int32, True),
        (33, 256, 2, F32, torch.int64, False),
    ],
)
def test_write_slot_writes_those_slots_and_no_other(
    draw, cache, device, C, D, T, dtype, integer, extras
):
    ours, theirs = cache(C, D, dtype, integer, extras)
    slot = torch.stack([torch.arange(T) + h for h in range(6)]).view(2, 3, T) % C
    slot[1, 2, 0] = -1  # a finished row
    slot[0, 1, T - 1] = C  # past the end
    new_k = draw(2, 3, T, D, dtype=dtype, heads_last=True)
    new_v = draw(2, 3, T, D, dtype=dtype)
    place = (torch.arange(2 * T).view(2, T) + 5000).to(device, integer)
    slot = slot.to(device)
    for function, (state, named) in ((write_slot, ours), (reference.write_slot, theirs)):
        more = {"new_rank": slot.int() + 7} if extras else {}
        function(*state, slot, new_k, new_v, place, **named, **more)
    assert _equal(ours, theirs)


@pytest.mark.parametrize(
    ("C", "D", "dtype", "integer", "extras"),
    [
        (1, 64, F32, torch.int64, False),
        (63, 80, F16, torch.int32, True),
        (129, 128, BF16, torch.int64, True),
        (65, 256, F32, torch.int64, False),
    ],
)
def test_fill_holes_moves_the_tail_into_the_holes(
    cache, guarded, device, C, D, dtype, integer, extras
):
    ours, theirs = cache(C, D, dtype, integer, extras)
    keep = torch.rand(2, 3, C, generator=torch.Generator().manual_seed(4)) < 0.4
    keep[0, 0] = False
    keep[0, 1] = True
    keep[0, 2] = torch.arange(C) >= C // 2
    keep = keep.to(device)
    kept = [sorted(theirs[0][2][b, h][keep[b, h]].tolist()) for b in range(2) for h in range(3)]
    workspace = guarded(torch.zeros(2, 2, 3, C, dtype=torch.int32, device=device))
    lengths = fill_holes(*ours[0], keep, **ours[1], workspace=workspace)
    expected = reference.fill_holes(*theirs[0], keep, **theirs[1])
    assert torch.equal(lengths, expected)
    # Keys and values behind the kept slots may hold anything.
    for state, _ in (ours, theirs):
        for buffer in state[:2]:
            buffer[state[2] < 0] = 0
    assert _equal(ours, theirs)
    left = [sorted(p for p in row.tolist() if p >= 0) for row in ours[0][2].flatten(0, 1)]
    assert left == kept


def test_fill_holes_allocates_its_own_workspace(cache, device):
    ours, theirs = cache(40, 64, F32, torch.int64, True)
    keep = torch.arange(40, device=device).expand(2, 3, 40).remainder(3).eq(2).contiguous()
    assert torch.equal(
        fill_holes(*ours[0], keep, **ours[1]), reference.fill_holes(*theirs[0], keep, **theirs[1])
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": torch.zeros(1, 1)}, r"slot has shape \(1, 1\)"),
        ({"slot": torch.zeros(1, 1, 1)}, "slot is torch.float32: give torch.int64 or torch.int32"),
        ({"new_keys": torch.zeros(1, 1, 1, 32)}, "new_keys has shape"),
        ({"values": torch.zeros(1, 1, 64, 4).mT}, "values has strides"),
        ({"rank": torch.zeros(1, 1, 4).int()}, "rank and new_rank: give both or none"),
    ],
)
def test_write_slot_refuses_what_it_cannot_serve(change, message):
    given = {
        "keys": torch.zeros(1, 1, 4, 64), "values": torch.zeros(1, 1, 4, 64),
        "position": torch.zeros(1, 1, 4).long(), "slot": torch.zeros(1, 1, 1).long(),
        "new_keys": torch.zeros(1, 1, 1, 64), "new_values": torch.zeros(1, 1, 1, 64),
        "new_position": torch.zeros(1, 1).long(),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        write_slot(**(given | change))


def test_fill_holes_refuses_another_workspace():
    buffer, place = torch.zeros(1, 1, 4, 64), torch.zeros(1, 1, 4).long()
    with pytest.raises(ValueError, match=r"workspace has shape \(2, 4\): give \(2, 1, 1, 4\)"):
        fill_holes(buffer, buffer.clone(), place, place == 0, workspace=torch.zeros(2, 4).int())
