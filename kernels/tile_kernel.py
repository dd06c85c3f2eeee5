"""Device code shared by the kernels of this room."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def mm(a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply two tiles into float32.

    The interpreter keeps bfloat16 as raw bits and would compute on those: UPCAST is set there.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def softmax_step(logits, m, mass):
    """Fold a tile of base-2 logits into a running maximum and sum.

    Returns:
        Probabilities relative to the new maximum, the factor on what was summed before, and the
        new maximum and sum. A row that has seen nothing stays at -inf, 0.
    """
    m_new = tl.maximum(m, tl.max(logits, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(logits - base[:, None])
    alpha = tl.exp2(m - base)
    return p, alpha, m_new, mass * alpha + tl.sum(p, 1)
