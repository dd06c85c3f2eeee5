"""stream: feed endless tokens through a model and a bounded cache, in constant memory.

`generate()` concatenates ids and positions at every step, which is quadratic over a long stream;
this loop holds one chunk at a time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvevict.cache import EvictionCache
from kvevict.errors import CacheError, PolicyError
from kvevict.models.placement import input_device
from kvevict.models.releases import cache_argument


@dataclass(frozen=True)
class Step:
    """One chunk of a stream.

    Attributes:
        start: position of its first token: the call's `start` plus what the cache had seen.
        nll: float32 `[n]`, -log p(token | what the cache held before it), in nats; nan for the
            first token of a call, since the cache keeps no logits.
        logits: float32 `[n, V]`, of the token after each, or None.
    """

    start: int
    nll: Tensor
    logits: Tensor | None


def stream(
    model: Any,
    tokens: Iterable[int] | Tensor,
    cache: EvictionCache,
    chunk: int = 64,
    logits: bool = False,
    start: int = 0,
) -> Iterator[Step]:
    """Feed tokens through a patched model and yield what each chunk gave.

    StreamingLLM and Window give the same for every chunk size; H2O evicts once a chunk, so its
    chunk is a setting to report.

    Args:
        model: a patched model.
        tokens: token ids: a tensor `[N]` or `[1, N]`, a list, or an iterator without end.
        cache: of one row, fresh or from an earlier call, which it continues.
        chunk: tokens a forward.
        logits: whether to yield them.
        start: added to the positions from here on, as if the stream stood so much later.

    Yields:
        A `Step` for each chunk.

    Raises:
        PolicyError: a chunk below 1 or a negative start.
        CacheError: the cache cannot go on (other model, poisoned, several rows).
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise PolicyError(f"chunk={chunk!r}: give a whole number of at least 1")
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise PolicyError(f"start={start!r}: give a whole number of at least 0")
    if not isinstance(cache, EvictionCache):
        raise CacheError(f"stream() needs an EvictionCache, not {type(cache).__name__}")
    return _run(model, tokens, cache, chunk, logits, start)


def _run(
    model: Any,
    tokens: Iterable[int] | Tensor,
    cache: EvictionCache,
    chunk: int,
    logits: bool,
    start: int,
) -> Iterator[Step]:
    device = input_device(model)
    name = cache_argument(model)
    cache.shift_stream(start)
    last: Tensor | None = None
    for ids in chunks(tokens, chunk):
        at = start + cache.seen
        with torch.no_grad():
            out = model(input_ids=ids.to(device)[None], use_cache=True, **{name: cache})
            step = out.logits[0].float()
            nll = torch.full((len(ids),), float("nan"))
            target = ids.to(device)
            if last is not None:
                nll[:1] = cross_entropy(last, target[:1], reduction="none").cpu()
            if len(ids) > 1:
                nll[1:] = cross_entropy(step[:-1], target[1:], reduction="none").cpu()
            last = step[-1:].clone()  # not a view: it would hold the whole chunk's logits
        yield Step(at, nll, step if logits else None)


def chunks(tokens: Iterable[int] | Tensor, chunk: int) -> Iterator[Tensor]:
    """Cut tokens into int64 tensors `[chunk]`, the last one shorter."""
    if isinstance(tokens, Tensor):
        flat = tokens.reshape(-1) if tokens.ndim < 2 or tokens.shape[0] == 1 else None
        if flat is None:
            raise CacheError(f"stream() feeds one row, not {tuple(tokens.shape)}")
        for first in range(0, len(flat), chunk):
            yield flat[first : first + chunk].long()
        return
    held: list[int] = []
    for token in tokens:
        held.append(int(token))
        if len(held) == chunk:
            yield torch.tensor(held)
            held = []
    if held:
        yield torch.tensor(held)
