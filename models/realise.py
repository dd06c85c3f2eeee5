"""realise: bring a message-aligned cache to an edited history, in one of three ways.

- `text`: what an API does: all from the first changed token on is computed again.
- `kv`: spans leave with their keys and values, what follows stays as it is, at its positions;
  only a span whose text changed is computed.
- `kv_reindex`: the same, and positions are closed up by an exact turn of the keys: one, or a few
  where spans were inserted before them.

The first is exact by definition. The others keep keys and values that have read what is gone; they
agree with `text` where the end of the history leaves, and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from kvevict.errors import PolicyError
from kvevict.models.aligned import MessageAlignedCache

Realisation = Literal["text", "kv", "kv_reindex"]
REALISATIONS: tuple[str, ...] = get_args(Realisation)
Part = tuple[int, ...]


@dataclass(frozen=True)
class Realised:
    """What an edit took.

    Attributes:
        fed: tokens computed.
        appended: of these, tokens of the new parts at the end.
        recomputed: `fed - appended`: what the eviction itself cost, prompt-cache writes included.
        dropped: tokens of messages that left or changed.
        turned: tokens whose keys were turned to another position.
        logits: float32 `[1, V]` after the last token, None where nothing was fed at the end.
    """

    fed: int
    appended: int
    dropped: int
    turned: int = 0
    logits: Tensor | None = None

    @property
    def recomputed(self) -> int:
        """Tokens computed that are no new text at the end."""
        return self.fed - self.appended


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common prefix."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def check_realisation(how: str) -> None:
    """Check the name of a realisation.

    Raises:
        PolicyError: another than the three.
    """
    if how not in REALISATIONS:
        raise PolicyError(f"realisation {how!r}: give {', '.join(REALISATIONS)}")


def realise(
    cache: MessageAlignedCache,
    parts: Sequence[Part],
    how: str = "kv",
    *,
    new: int = 0,
    chunk: int = 256,
) -> Realised:
    """Bring a cache to these parts.

    Args:
        cache: with the history before the edit, one piece a part; changed in place.
        parts: the edited history's spans, each its tokens; empty ones are left out.
        how: "text", "kv" or "kv_reindex".
        new: parts at the end that the history did not have before; they are always computed.
        chunk: tokens a forward.

    Raises:
        PolicyError: an unknown realisation. BudgetError: more tokens than the cache takes.
    """
    check_realisation(how)
    cut = len(parts) - new
    old, fresh = ([p for p in x if p] for x in (parts[:cut], parts[cut:]))
    kept = staying(cache, old)
    left = cache.stored - sum(len(cache.pieces[i].ids) for i in kept)
    before = cache.fed_tokens
    if how == "text":
        logits, turned = _by_text(cache, old, fresh, chunk), 0
    else:
        logits, turned = _by_kv(cache, old, fresh, kept, how, chunk)
    return Realised(cache.fed_tokens - before, sum(map(len, fresh)), left, turned, logits)


def staying(cache: MessageAlignedCache, parts: Sequence[Part]) -> dict[int, int]:
    """Return which pieces stay as which parts: the most tokens that can stay, in order."""
    return _matched([p.ids for p in cache.pieces], parts)


def _matched(old: Sequence[Part], parts: Sequence[Part]) -> dict[int, int]:
    start = common_prefix(old, parts)
    kept = {i: i for i in range(start)}
    rest, goal = old[start:], parts[start:]
    end = common_prefix(rest[::-1], goal[::-1])
    kept |= {len(old) - i: len(parts) - i for i in range(end, 0, -1)}
    rest, goal = rest[: len(rest) - end], goal[: len(goal) - end]
    best = [[0] * (len(goal) + 1) for _ in range(len(rest) + 1)]  # tokens from (piece, part) on
    for i in reversed(range(len(rest))):
        for j in reversed(range(len(goal))):
            same = len(rest[i]) + best[i + 1][j + 1] if rest[i] == goal[j] else 0
            best[i][j] = max(same, best[i + 1][j], best[i][j + 1])
    i = j = 0
    while i < len(rest) and j < len(goal):
        if rest[i] == goal[j] and best[i][j] == len(rest[i]) + best[i + 1][j + 1]:
            kept[start + i] = start + j
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return kept


def _by_text(
    cache: MessageAlignedCache, old: Sequence[Part], fresh: Sequence[Part], chunk: int
) -> Tensor | None:
    """Compute all from the first token that differs on; whatever has a gap, from the gap on."""
    parts = [*old, *fresh]
    known = [i for part in old for i in part]
    shared = min(common_prefix(cache.ids, known), _without_gap(cache))
    cache.rewind(shared)
    rest = [*known[shared:], *(i for part in fresh for i in part)]
    logits = cache.append(rest, chunk=chunk)
    cache.regroup(parts)
    return logits


def _without_gap(cache: MessageAlignedCache) -> int:
    """Return how many tokens from the start stand at their own rank."""
    rank = 0
    for piece in cache.pieces:
        if piece.start != rank:
            return rank
        rank += len(piece.ids)
    return rank


def _by_kv(
    cache: MessageAlignedCache,
    parts: Sequence[Part],
    fresh: Sequence[Part],
    kept: dict[int, int],
    how: str,
    chunk: int,
) -> tuple[Tensor | None, int]:
    starts = {place: cache.pieces[i].start for i, place in kept.items()}
    cache.drop([i for i in range(len(cache.pieces)) if i not in kept])
    cache.rewind(cache.stored)  # nothing has read an end that left, so positions go on before it
    last = max(starts, default=-1)
    inserted = [place for place in range(last) if place not in starts]
    if how == "kv_reindex" and not inserted:
        cache.close_gaps()
    for place in inserted:
        cache.insert(place, parts[place], chunk=chunk)
    if how == "kv_reindex":
        cache.close_gaps()
    turned = sum(len(parts[i]) for i, start in starts.items() if cache.pieces[i].start != start)
    logits = cache.append_all([*parts[last + 1 :], *fresh], chunk=chunk)
    return logits, turned
