"""Rotary positions, found by measuring: the shift probe, and exact rotations of stored keys.

Rotary embeddings are relative, so a model run at positions p and at p + delta gives the same
hidden states, and cached keys that differ by exactly the rotation by delta. `probe` finds from
that, for every layer, which rotation it is (Su et al. 2021, arXiv:2104.09864, in its half-split
and interleaved layouts, whole or partial); a layer where none fits is refused rather than guessed.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Style = Literal["half", "pair", "none"]
Turn = tuple[Tensor, Tensor]


@dataclass
class Rope:
    """The rotation of one layer's keys.

    Attributes:
        style: "half" (first and second half form pairs), "pair" (neighbours do) or "none" (NoPE).
        inv_freq: float64 `[R/2]`, radians a position; negative where a model turns the other way.
        start: first of the R rotated dims.
        dims: R, how many are rotated.
        key: equal for layers that turn alike, so that they share cos and sin.
    """

    style: Style
    inv_freq: Tensor
    start: int = 0
    dims: int = 0
    key: int = 0
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def turn(self, delta: Tensor | int, device: torch.device) -> Turn:
        """Return float32 cos and sin `[..., R/2]` of a shift by delta positions.

        Angles are computed in float64: at position 4,000,000 a float32 angle is off by 0.08 rad.
        """
        freq = self._moved.get(device)
        if freq is None:
            freq = self._moved[device] = self.inv_freq.to(device)
        delta = torch.as_tensor(delta, dtype=torch.float64, device=device)
        angle = delta[..., None] * freq
        return angle.cos().float(), angle.sin().float()

    def rotate(self, x: Tensor, turn: Turn) -> Tensor:
        """Return x `[..., D]` rotated in one rounding: in float32, stored in x's dtype."""
        if self.style == "none":
            return x
        part = x[..., self.start : self.start + self.dims].float()
        turned = _turned(self.style, part, *turn)
        if self.dims == x.shape[-1]:
            return turned.to(x.dtype)
        whole = x.clone()
        whole[..., self.start : self.start + self.dims] = turned.to(x.dtype)
        return whole

    def same_as(self, other: "Rope") -> bool:
        """Whether two layers turn alike, so that cos and sin can be shared."""
        return (
            (self.style, self.start, self.dims) == (other.style, other.start, other.dims)
            and self.inv_freq.shape == other.inv_freq.shape
            and bool(torch.equal(self.inv_freq, other.inv_freq))
        )


def no_rotation() -> Rope:
    """Return the rotation of a layer that has none."""
    return Rope("none", torch.zeros(0, dtype=torch.float64))


def fit(
    before: Tensor, after: Tensor, delta: int, candidates: list[Tensor], tol: float
) -> Rope | None:
    """Find the rotation that takes keys at p to the same tokens' keys at p + delta.

    Args:
        before: keys at p, `[B, H, T, D]`.
        after: keys at p + delta, the same shape.
        delta: the shift in positions.
        candidates: frequencies `[R/2]` found in the model.
        tol: largest error relative to the largest key entry.

    Returns:
        The rotation, or None when none fits.
    """
    x, y = before.double().cpu(), after.double().cpu()
    scale = y.abs().max().clamp_min(1e-12)
    if (x - y).abs().max() / scale < tol:
        return no_rotation()
    best: tuple[float, Rope] | None = None
    D = x.shape[-1]
    for freq in candidates:
        dims = 2 * freq.numel()
        if dims > D:
            continue
        for start in sorted({0, D - dims}):
            for style in ("half", "pair"):
                for sign in (1.0, -1.0):
                    rope = Rope(style, sign * freq.double().cpu(), start, dims)
                    error = _error(rope, x, y, delta) / float(scale)
                    if best is None or error < best[0]:
                        best = (error, rope)
    return best[1] if best is not None and best[0] < tol else None


def _error(rope: Rope, x: Tensor, y: Tensor, delta: int) -> float:
    angle = delta * rope.inv_freq
    rotated = slice(rope.start, rope.start + rope.dims)
    turned = _turned(rope.style, x[..., rotated], angle.cos(), angle.sin())
    rest = (x - y).abs()
    rest[..., rotated] = (turned - y[..., rotated]).abs()
    return float(rest.max())


def _turned(style: Style, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if style == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    first, second = x[..., 0::2], x[..., 1::2]
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return pairs.flatten(-2)
