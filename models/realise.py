"""realise: bring a message-aligned cache to an edited history, in one of three ways.

- `text`: what an API does: all from the first changed token on is computed again.
- `kv`: spans leave with their keys and values, what follows stays as it is, at its positions;
  only a span whose text changed is computed.
- `kv_reindex`: the same, and positions are closed up by one exact turn of the keys.

The first is exact by definition. The others keep keys and values that have read what is gone; they
agree with `text` where the end of the history leaves, and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
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
        appended: of these, tokens of parts at the end that the cache had not stored before.
        recomputed: `fed - appended`: what the eviction itself cost, prompt-cache writes included.
        dropped: tokens that left.
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


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
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
        new: parts at the end that the history did not have before.
        chunk: tokens a forward.

    Raises:
        PolicyError: an unknown realisation. BudgetError: more tokens than the cache takes.
    """
    check_realisation(how)
    cut = len(parts) - new
    old, fresh_parts = ([p for p in x if p] for x in (parts[:cut], parts[cut:]))
    fresh = sum(map(len, fresh_parts))
    before = cache.fed_tokens
    stored = cache.stored
    if how == "text":
        logits, turned = _by_text(cache, [*old, *fresh_parts], chunk)
    else:
        logits, turned = _by_kv(cache, old, fresh_parts, how, chunk)
    fed = cache.fed_tokens - before
    dropped = stored + fed - cache.stored
    return Realised(fed, min(fresh, fed), dropped, turned, logits)


def _by_text(
    cache: MessageAlignedCache, parts: Sequence[Part], chunk: int
) -> tuple[Tensor | None, int]:
    """Compute all from the first token that differs on; whatever has a gap, from the gap on."""
    wanted = [i for part in parts for i in part]
    shared = min(common_prefix(cache.ids, wanted), _without_gap(cache))
    cache.rewind(shared)
    rest, at, extend = [], 0, False
    for part in parts:
        known = min(max(shared - at, 0), len(part))
        at += len(part)
        if known < len(part):
            extend = extend or known > 0
            rest.append(part[known:])
    logits = cache.append_all(rest, chunk=chunk, extend=extend)
    return logits, 0


def _without_gap(cache: MessageAlignedCache) -> int:
    """Return how many tokens from the start stand at their own rank."""
    rank = 0
    for piece in cache.pieces:
        if piece.start != rank:
            return rank
        rank += len(piece.ids)
    return rank


def _by_kv(
    cache: MessageAlignedCache, parts: Sequence[Part], fresh: Sequence[Part], how: str, chunk: int
) -> tuple[Tensor | None, int]:
    old = [p.ids for p in cache.pieces]
    match = SequenceMatcher(None, old, list(parts), autojunk=False).get_matching_blocks()
    kept = {b.a + i: b.b + i for b in match for i in range(b.size)}  # piece -> part
    cache.drop([i for i in range(len(old)) if i not in kept])
    turned = cache.close_gaps() if how == "kv_reindex" and not _inserts(kept, len(parts)) else 0
    last = max(kept.values(), default=-1)
    stay = set(kept.values())
    for place in range(last):
        if place not in stay:
            cache.insert(place, parts[place], chunk=chunk)
    if how == "kv_reindex":
        turned = max(turned, cache.close_gaps())
    logits = cache.append_all([*parts[last + 1 :], *fresh], chunk=chunk)
    return logits, turned


def _inserts(kept: dict[int, int], parts: int) -> bool:
    """Whether a part comes to stand before one that stays."""
    places = [-1, *sorted(kept.values())]
    return any(b - a > 1 for a, b in pairwise(places)) and parts > 0
