"""GPU times of each kernel against its floor and against torch's attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks import counting
from benchmarks.counting import Work
from kvevict.kernels import library, reference
from kvevict.kernels.attention_lse import attention_lse
from kvevict.kernels.column_sum import column_sum
from kvevict.kernels.decode import decode
from kvevict.kernels.fill_holes import fill_holes
from kvevict.kernels.write_slot import write_slot

H, G, D = 8, 4, 128  # Llama-3-8B


class Case(NamedTuple):
    """One thing to time.

    Attributes:
        name: operation and implementation, "decode: ours, scores".
        shape: what varies, for the table.
        call: runs it once.
        work: what it cannot do without.
        graph: whether it is timed by replaying a CUDA graph.
    """

    name: str
    shape: dict[str, int]
    call: Callable[[], Any]
    work: Work
    graph: bool = True


class Sizes(NamedTuple):
    """Which sizes are run: the real ones, or tiny ones that exercise this script."""

    slots: tuple[int, ...] = (1024, 2048, 4096, 8192)
    batches: tuple[int, ...] = (1, 8, 16, 64)
    lengths: tuple[int, ...] = (8192, 32768, 131072)
    eager: int = 8192
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16


TINY = Sizes((33,), (1, 2), (40,), 40, "cpu", torch.float32)


def kernel_cases(sizes: Sizes) -> Iterator[Case]:
    """Yield every case; buffers live as long as the case in hand."""
    for B in sizes.batches:
        for C in sizes.slots:
            yield from _decode(sizes, B, C)
    yield from _evictions(sizes, sizes.batches[-1], sizes.slots[-1])
    for N in sizes.lengths:
        yield from _prefill(sizes, N)


def _normal(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randn(*shape, device=sizes.device, dtype=sizes.dtype)


def _decode(sizes: Sizes, B: int, C: int) -> Iterator[Case]:
    q, q_sink = _normal(sizes, B, H * G, 1, D), _normal(sizes, B, H * G, 1, D)
    k, v = _normal(sizes, B, H, C, D), _normal(sizes, B, H, C, D)
    position = torch.arange(C, device=sizes.device).expand(B, H, C).contiguous()
    now = torch.full((B, 1), C - 1, device=sizes.device)
    scores = torch.rand(B, H, C, device=sizes.device)
    angle = torch.rand(C, D // 2, device=sizes.device)
    rotation = {"rank": reference.slot_rank(position), "cos": angle.cos(), "sin": angle.sin()}
    shape = {"batch": B, "slots": C}
    work = functools.partial(counting.decode, B, H, G, 1, C, D, itemsize=q.element_size())
    scored = {"scores": scores, "recent": C // 2}
    ours = functools.partial(decode, q, k, v, position, now)
    yield Case("decode: ours", shape, ours, work())
    yield Case(
        "decode: ours, scores and victim", shape, functools.partial(ours, **scored),
        work(scored=True, victim=True),
    )  # fmt: skip
    yield Case(
        "decode: ours, two queries", shape,
        functools.partial(ours, q_sink=q_sink, sinks=4, window=C), work(),
    )  # fmt: skip
    yield Case(
        "decode: ours, rotation by rank, scores and victim", shape,
        functools.partial(ours, **rotation, **scored), work(scored=True, victim=True, rank=True),
    )  # fmt: skip
    yield Case(
        "decode: torch SDPA, no scores", shape,
        functools.partial(sdpa, q, k, v, enable_gqa=True), work(),
    )  # fmt: skip

    def eager() -> None:
        p = torch.matmul(q.unflatten(1, (H, G))[..., 0, :], k.mT).float().mul_(D**-0.5).softmax(-1)
        torch.matmul(p.to(v.dtype), v)
        scores.add_(p.sum(2))
        scores.argmin(-1)

    yield Case("decode: eager, scores and victim", shape, eager, work(scored=True, victim=True))


def _evictions(sizes: Sizes, B: int, C: int) -> Iterator[Case]:
    k, v = _normal(sizes, B, H, C, D), _normal(sizes, B, H, C, D)
    position = torch.arange(C, device=sizes.device).expand(B, H, C).contiguous()
    slot = torch.randint(0, C, (B, H, 1), device=sizes.device)
    one = _normal(sizes, B, H, 1, D)
    first = torch.zeros(B, 1, dtype=torch.int64, device=sizes.device)
    shape = {"batch": B, "slots": C}
    item = k.element_size()
    yield Case(
        "write_slot", shape,
        functools.partial(write_slot, k, v, position, slot, one, one, first),
        counting.moves(B * H, D, itemsize=item),
    )  # fmt: skip
    keep = torch.rand(B, H, C, device=sizes.device) < 0.5
    workspace = torch.zeros(2, B, H, C, dtype=torch.int32, device=sizes.device)
    length = keep.sum(-1, keepdim=True)
    behind = torch.arange(C, device=sizes.device) >= length
    moved = int((keep & behind).sum())
    # The move of a slot does not look at what it held: the same list of moves can be repeated.
    yield Case(
        "fill_holes: half kept", shape,
        functools.partial(fill_holes, k, v, position, keep, workspace=workspace),
        counting.moves(moved, D, itemsize=item),
    )  # fmt: skip
    index = torch.argsort(keep.int(), dim=-1, descending=True, stable=True)[..., : C // 2, None]
    index = index.expand(-1, -1, -1, D)
    yield Case(
        "fill_holes: torch gather into new buffers", shape,
        lambda: (k.gather(2, index), v.gather(2, index)), counting.moves(moved, D, itemsize=item),
    )  # fmt: skip


def _prefill(sizes: Sizes, N: int) -> Iterator[Case]:
    q = _normal(sizes, 1, H * G, N, D)
    k, v = _normal(sizes, 1, H, N, D), _normal(sizes, 1, H, N, D)
    lse = attention_lse(q, k, v).lse
    shape = {"batch": 1, "tokens": N}
    item = q.element_size()
    whole = counting.attention(1, H, G, N, N, D, itemsize=item)
    sums = functools.partial(counting.column_sum, 1, H, G, N, N, D, itemsize=item)
    causal = functools.partial(sdpa, q, k, v, is_causal=True, enable_gqa=True)
    yield Case("prefill attention: torch SDPA", shape, causal, whole, graph=False)
    yield Case(
        "prefill attention: ours (fallback)", shape, functools.partial(attention_lse, q, k, v),
        whole, graph=False,
    )  # fmt: skip
    yield Case(
        "column sums: ours", shape, functools.partial(column_sum, q, k, lse), sums(), graph=False
    )
    yield Case(
        "column sums: ours, last 32 queries", shape,
        functools.partial(column_sum, q, k, lse, q_lo=N - 32), sums(q_lo=N - 32), graph=False,
    )  # fmt: skip
    if sizes.eager >= N:
        yield Case(
            "column sums: torch, in chunks", shape,
            functools.partial(library.column_sum, q, k, lse, D**-0.5, causal=True), sums(),
            graph=False,
        )  # fmt: skip

        def eager() -> None:
            mask = torch.ones(N, N, dtype=torch.bool, device=q.device).tril_()
            logits = (q.unflatten(1, (H, G)) @ k[:, :, None].mT).float().mul_(D**-0.5)
            p = logits.masked_fill_(~mask, -torch.inf).softmax(-1)
            _ = p.to(v.dtype) @ v[:, :, None], p.sum((2, 3))

        yield Case("attention and column sums: eager", shape, eager, whole, graph=False)
