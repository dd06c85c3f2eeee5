"""Where the kernels run, and the traps around them: poisoned memory, guard regions, tolerance.

Without CUDA the kernels run under Triton's interpreter, which is switched on for one test at a
time: other rooms' tests in the same process must not see it.
"""

import math
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kvevict.kernels import reference

GUARD = 1 << 13  # elements on either side: a tile past the end stays inside; keeps alignment
POISON = {torch.int64: -(2**62), torch.int32: -(2**30)}


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return "cuda"
    if torch.cuda.is_available():
        pytest.skip("a process compiles the kernels or interprets them: with CUDA run -m gpu")
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _interpret_helpers()
    return "cpu"


def _interpret_helpers() -> None:
    """Decorate tl.sum, tl.max and the like again, now that the interpreter is on.

    Triton decorates them when it is imported, and transformers imports it.
    """
    import triton
    import triton.language
    from triton.runtime.jit import JITFunction

    again: dict[int, object] = {}
    modules = [m for name, m in sys.modules.items() if name.startswith("triton.language")]
    for module in modules:
        for name, helper in list(vars(module).items()):
            if isinstance(helper, JITFunction):
                if id(helper) not in again:
                    again[id(helper)] = triton.jit(helper.fn)
                setattr(module, name, again[id(helper)])


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: object) -> tuple[Tensor, Tensor]:
    """Return a tensor full of nan (or absurd integers) and the guarded storage around it."""
    poison = math.nan if dtype.is_floating_point else POISON.get(dtype, 1)
    storage = torch.full((math.prod(shape) + 2 * GUARD,), poison, dtype=dtype, device=device)
    return storage[GUARD : storage.numel() - GUARD].view(shape), storage


def _is_poison(part: Tensor) -> bool:
    if part.dtype.is_floating_point:
        return bool(part.isnan().all())
    return bool((part == POISON.get(part.dtype, 1)).all())


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Tensor], Tensor]]:
    """Poison torch.empty, put guard regions around it, and offer the same for a test's tensors."""
    storages: list[Tensor] = []

    def empty(*shape: object, dtype: torch.dtype | None = None, device: object = None) -> Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        tensor, storage = _poisoned(tuple(sizes), dtype or torch.float32, device)  # type: ignore[arg-type]
        storages.append(storage)
        return tensor

    def guard(tensor: Tensor) -> Tensor:
        inner, storage = _poisoned(tuple(tensor.shape), tensor.dtype, tensor.device)
        inner.copy_(tensor)
        storages.append(storage)
        return inner

    monkeypatch.setattr(torch, "empty", empty)
    yield guard
    for storage in storages:
        for part in (storage[:GUARD], storage[-GUARD:]):
            assert _is_poison(part), "a kernel wrote outside its tensor"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Return a caller of the reference in the dtype of its inputs: what plain torch would lose."""

    def call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_wide", lambda q: q.dtype)
            return function(*args, **kwargs)

    return call


@pytest.fixture
def agrees() -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return the check that a result loses at most twice what plain torch loses (+ rounding)."""

    def check(ours: Tensor, exact: Tensor, rough: Tensor) -> None:
        assert ours.shape == exact.shape
        assert torch.equal(ours.isfinite(), exact.isfinite())
        exact = exact.nan_to_num(posinf=0, neginf=0)
        ours, rough = (t.double().nan_to_num(posinf=0, neginf=0) for t in (ours, rough))
        floor = 2 * torch.finfo(torch.float32).eps * exact.abs().max().clamp(min=1)
        allowed = 2 * (rough - exact).abs().max() + floor
        lost = (ours - exact).abs().max()
        assert lost <= allowed, f"lost {lost:.3g}, plain torch {(rough - exact).abs().max():.3g}"

    return check


@pytest.fixture
def draw(device: str) -> Callable[..., Tensor]:
    """Return a seeded maker of normal tensors; `heads_last` gives the layout of a projection."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.float32, heads_last: bool = False) -> Tensor:
        if heads_last:
            b, h, m, d = shape
            wide = torch.randn(b, m, h, d, generator=generator).transpose(1, 2)
            return wide.to(device=device, dtype=dtype)
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    return make


@pytest.fixture
def key_mask(device: str) -> Callable[[str, int, int, int], Tensor | None]:
    """Return a maker of key masks: "none", "left" [B, N], "holes" [B, H, N], "dead" [B, N]."""
    generator = torch.Generator().manual_seed(1)

    def make(kind: str, B: int, H: int, N: int) -> Tensor | None:
        if kind == "none":
            return None
        if kind == "holes":
            return (torch.rand(B, H, N, generator=generator) > 0.3).to(device)
        pads = torch.arange(B)[:, None] * (N // 3) + (1 if N > 1 else 0)
        mask = torch.arange(N).expand(B, N) >= pads
        if kind == "dead":
            mask[-1] = False
        return mask.to(device)

    return make
