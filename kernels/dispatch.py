"""Which backend serves a device, and what a launcher needs to know about that device."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

Backend = Literal["torch", "triton"]
BACKENDS = ("auto", "torch", "triton")


def resolve_backend(backend: str, device: torch.device | str) -> Backend:
    """Choose the implementation for tensors of a device.

    Args:
        backend: "auto" takes Triton on a GPU that it supports and torch elsewhere; "torch" and
            "triton" are taken at their word.
        device: where the tensors are.

    Returns:
        "torch" or "triton".

    Raises:
        ValueError: an unknown backend.
        RuntimeError: "triton" was asked for by name and cannot run; names the reason and remedy.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r}: give one of {', '.join(map(repr, BACKENDS))}")
    if backend == "torch":
        return "torch"
    reason = why_not_triton(torch.device(device))
    if reason is None and (backend == "triton" or torch.device(device).type == "cuda"):
        return "triton"
    if backend == "triton":
        raise RuntimeError(
            f'backend "triton" cannot run on device {str(device)!r}: {reason}; '
            'use backend="torch" or "auto"'
        )
    return "torch"


def why_not_triton(device: torch.device) -> str | None:
    """Return the reason why Triton cannot serve a device, or None where it can."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton, Linux only)"
    if interpreted():
        return None
    if device.type != "cuda":
        return "it needs a CUDA or ROCm GPU (or TRITON_INTERPRET=1, slow, for tests)"
    if not torch.cuda.is_available():
        return "torch finds no usable GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter is switched on (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def arch_of(device: torch.device) -> str:
    """Return the column of the config table for a device: "sm_90", "gfx942", "interpreter".

    Raises:
        RuntimeError: the kernels cannot run there.
    """
    if interpreted():
        return "interpreter"
    _need_gpu(device)
    return _gpu_arch(device)


def processors_of(device: torch.device) -> int:
    """Return the number of multiprocessors; 4 under the interpreter, so that work is split."""
    return 4 if interpreted() else _gpu_processors(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which launches go to this device.

    Raises:
        RuntimeError: the kernels cannot run there.
    """
    if device.type == "cuda":
        return torch.cuda.device(device)
    _need_gpu(device)
    return nullcontext()


def _need_gpu(device: torch.device) -> None:
    if device.type != "cuda" and not interpreted():
        raise RuntimeError(
            f"the Triton kernels cannot run on device {str(device)!r}: {why_not_triton(device)}; "
            'use backend="torch" or "auto"'
        )


@cache
def _gpu_arch(device: torch.device) -> str:
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    # Consumer Blackwell (12.x) has the small shared memory of sm_8x.
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


@cache
def _gpu_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
