"""Policy: head, recent and importance under one budget; the same body for tokens and messages.

A policy is a frozen dataclass without state: scores and positions live in the cache (tokens) or
in the history (messages). It is written once, in the array API standard, and so runs on numpy
arrays and on torch tensors of any device.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from abc import ABC
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

from array_api_compat import array_namespace

from kvevict.errors import PolicyError
from kvevict.slots import Array, Slots

REGISTRY: dict[str, type[Policy]] = {}

Scores = Literal["none", "sum", "window", "last"]
Scope = Literal["head", "layer"]
T = TypeVar("T")


@dataclass(frozen=True)
class Policy(ABC):
    """What is kept: the head, the recent, and of the middle the most important.

    A subclass registers itself by name (`class H2O(Policy, name="h2o")`), declares its fields and
    answers `extents`. The three extents are in tokens; at message granularity they are filled
    with whole groups.

    Attributes:
        scores: what importance is read from: "none"; "sum", attention accumulated over all
            queries; "window", over the last `score_window` queries of a forward; "last", the last
            query alone.
        score_window: queries counted when `scores` is "window".
        decay_factor: factor on old scores per new token before its own are added (1.0: sums).
    """

    name: ClassVar[str]
    scores: ClassVar[Scores] = "none"
    score_window: ClassVar[int] = 0
    decay_factor: ClassVar[float] = 1.0

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is None:
            return
        taken = REGISTRY.get(name)
        if taken is not None and taken.__qualname__ != cls.__qualname__:
            raise PolicyError(f"policy name {name!r} is taken by {taken.__qualname__}")
        cls.name = name
        REGISTRY[name] = cls

    # -- what a policy is -----------------------------------------------------------------------

    @property
    def extents(self) -> tuple[int, int, int] | None:
        """Tokens of head, recent and importance; None keeps everything."""
        raise NotImplementedError

    @property
    def capacity(self) -> int | None:
        """Most tokens kept, or None when nothing is ever evicted.

        Raises:
            PolicyError: a share of a prompt whose length is not known yet.
        """
        extents = self.extents
        return None if extents is None else sum(extents)

    @property
    def needs_scores(self) -> bool:
        """Whether eviction needs attention scores."""
        return self.scores != "none"

    @property
    def band(self) -> int | None:
        """Distance to the farthest token seen outside the head; None sees all that is stored.

        A policy that depends only on position (no importance part) has a band, and so gives the
        same result for any chunk size.
        """
        extents = self.extents
        return None if extents is None or extents[2] else extents[1]

    @property
    def votes_repeat(self) -> bool:
        """Whether, with `scores` "window", single tokens' queries count too."""
        return False

    @property
    def scope(self) -> Scope:
        """What keeps one set of tokens: each KV "head" its own, or all heads of a "layer" together.

        With "layer", scores are summed over the heads, over ranks too where heads are split.
        """
        return "head"

    def importance(self, slots: Slots) -> Array:
        """Return what the middle is ranked by, `[..., N]`; larger stays longer."""
        return slots.score

    def resolve(self, prompt_length: int) -> Self:
        """Return the policy with shares ("20%") turned into tokens of a prompt of this length."""
        shares = {
            f.name: share_of(getattr(self, f.name), prompt_length)
            for f in fields(self)
            if is_share(getattr(self, f.name))
        }
        return replace(self, **shares) if shares else self

    @property
    def has_shares(self) -> bool:
        """Whether a field is a share of a prompt whose length is still needed."""
        return any(is_share(getattr(self, f.name)) for f in fields(self))

    # -- what a policy does ---------------------------------------------------------------------

    def keep(self, slots: Slots) -> Array:
        """Choose the slots that stay.

        Args:
            slots: N slots in any order. Protected slots always stay and use up the importance
                part, then recent, of the budget first.

        Returns:
            bool `[..., N]`. At most `capacity` tokens are True per row unless the protected alone
            are more. Of equal scores the newer stays.
        """
        xp = array_namespace(slots.position)
        if slots.group is not None:
            coarse, index = slots.coarsened()
            return xp.take(self.keep(coarse), index, axis=-1)
        extents = self.extents
        live = slots.position >= 0
        if extents is None:
            return live
        slots = slots.filled()
        head, recent, heavy = extents
        size = xp.broadcast_to(slots.size, live.shape)
        size = xp.where(live, size, xp.zeros_like(size))
        # Roots come out of the importance part first, then out of recent, then out of the head.
        protected: Array = slots.protected
        spent = xp.where(protected & live, size, xp.zeros_like(size))
        spent = xp.sum(spent, axis=-1, keepdims=True, dtype=size.dtype)
        loose = live & ~protected
        head_left = xp.clip(head - xp.clip(spent - heavy - recent, 0, None), 0, None)
        recent_left = xp.clip(recent - xp.clip(spent - heavy, 0, None), 0, None)
        heavy_left = xp.clip(heavy - spent, 0, None)

        kept = protected & live
        if head:
            in_head = _prefix(xp, slots.position, loose, size, head_left, newest=False)
            kept, loose = kept | in_head, loose & ~in_head
        if recent:
            in_recent = _prefix(xp, slots.position, loose, size, recent_left, newest=True)
            kept, loose = kept | in_recent, loose & ~in_recent
        if heavy:
            loose = loose & (size <= heavy_left)  # a group larger than the rest can never fit
            order = _argsort_by(xp, self.importance(slots), slots.position)
            kept = kept | _fill(xp, order, loose, size, heavy_left)
        # Parts are filled apart: what fits as a whole stays, though no part may have room for it.
        fits = xp.sum(size, axis=-1, keepdims=True, dtype=size.dtype) <= head + recent + heavy
        return kept | (fits & live)

    def victim(self, score: Array | None, position: Array, seen: Array | int) -> Array:
        """Choose the one slot that the next token overwrites.

        Equal to `keep` of a cache that is one token over its budget: empty slots first, then the
        smallest importance outside head and recent, of equal ones the older.

        Args:
            score: `[..., N]` float, or None for a policy that needs none.
            position: `[..., N]` original positions, -1 empty.
            seen: tokens seen so far, an int or `[..., 1]`.

        Returns:
            integers `[...]`, index of the slot.

        Raises:
            PolicyError: the policy keeps everything.
        """
        xp = array_namespace(position)
        extents = self.extents
        if extents is None:
            raise PolicyError(f"policy {self} keeps everything: it has no victim")
        head, recent, heavy = extents
        loose = (position < seen - recent) & (position >= head)
        if heavy:
            worth = self.importance(Slots(position=position, score=score))
            lowest = xp.where(loose, worth, xp.full_like(worth, math.inf))
            loose = loose & (worth == xp.min(lowest, axis=-1, keepdims=True))
        big = xp.full_like(position, xp.iinfo(position.dtype).max)
        age = xp.where(loose | (position < 0), position, big)
        return xp.argmin(age, axis=-1)

    # -- how a policy is written ------------------------------------------------------------------

    def departures(self) -> dict[str, Any]:
        """Return the settings that depart from the published method, for reports."""
        return {}

    def __str__(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)]
        return self.name + (":" + ",".join(parts) if parts else "")


def _argsort_by(xp: Any, value: Array, position: Array) -> Array:
    """Return the order of slots by value descending; of equal values the newer first."""
    newest = xp.argsort(position, axis=-1, descending=True, stable=True)
    value = xp.broadcast_to(value, position.shape)
    order = xp.argsort(_take(xp, value, newest), axis=-1, descending=True, stable=True)
    return _take(xp, newest, order)


def _prefix(
    xp: Any, position: Array, among: Array, size: Array, room: Array, newest: bool
) -> Array:
    order = xp.argsort(position, axis=-1, descending=newest, stable=True)
    return _fill(xp, order, among, size, room)


def _fill(xp: Any, order: Array, among: Array, size: Array, room: Array) -> Array:
    """Take slots of `among` in this order until the first that no longer fits into `room`."""
    wanted, cost = _take(xp, among, order), _take(xp, size, order)
    total = xp.cumulative_sum(xp.where(wanted, cost, xp.zeros_like(cost)), axis=-1)
    return _put(xp, wanted & (total <= room), order)


def _take(xp: Any, value: Array, order: Array) -> Array:
    """Return `value` in this order; torch's own way is faster than the standard's."""
    if hasattr(value, "gather"):
        return value.gather(-1, order)
    return xp.take_along_axis(value, order, axis=-1)  # type: ignore[no-any-return]


def _put(xp: Any, value: Array, order: Array) -> Array:
    """Undo `_take`: return what gives `value` in this order."""
    if hasattr(value, "scatter"):
        return value.scatter(-1, order, value)  # every place is written
    return _take(xp, value, xp.argsort(order, axis=-1))


# -- settings ------------------------------------------------------------------------------------


def is_share(value: object) -> bool:
    """Whether a setting is a share of the prompt such as "20%"."""
    return isinstance(value, str) and value.strip().endswith("%")


def share_of(value: str, length: int) -> int:
    """Return a share such as "20%" of a length, in whole tokens, rounded down."""
    return int(float(value.strip()[:-1]) * length / 100)


def check_tokens(policy: Policy, name: str, minimum: int = 0, share: bool = False) -> None:
    """Check that a field is a whole number of tokens, or a share of a prompt where allowed.

    Raises:
        PolicyError: with the value and the remedy.
    """
    value = getattr(policy, name)
    label = f"{type(policy).__name__}.{name}={value!r}"
    if is_share(value):
        if not share:
            raise PolicyError(f"{label}: a share is not possible here, give a number of tokens")
        try:
            percent = float(value.strip()[:-1])
        except ValueError:
            percent = math.nan
        if not 0 <= percent <= 100:
            raise PolicyError(f"{label}: a share lies between 0% and 100%")
        return
    if isinstance(value, bool) or not isinstance(value, int):
        extra = ' or a share such as "20%"' if share else ""
        raise PolicyError(f"{label}: give a whole number of tokens{extra}")
    if value < minimum:
        raise PolicyError(f"{label}: give at least {minimum}")


def check_scope(policy: Policy) -> None:
    """Check that a policy's scope is one of the two.

    Raises:
        PolicyError: with the value and the remedy.
    """
    if policy.scope not in typing.get_args(Scope):
        raise PolicyError(f'{type(policy).__name__}.scope={policy.scope!r}: give "head" or "layer"')


def parse(text: str | Policy) -> Policy:
    """Build a policy from a string such as ``"h2o:heavy=512,recent=512"``.

    Args:
        text: `name` or `name:key=value,key=value`; a policy is returned as it is.

    Raises:
        PolicyError: unknown name or key (the known ones are listed), or a value of the wrong kind.
    """
    import kvevict.policies  # noqa: F401  registers every policy, on first use only

    if isinstance(text, Policy):
        return text
    name, settings = split_policy(text)
    return build_policy(lookup(REGISTRY, name, "policy"), settings)


def split_policy(text: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,...`` into the name and its settings.

    Raises:
        PolicyError: text that is not of this form.
    """
    if not isinstance(text, str):
        raise PolicyError(f"a policy is a string or a Policy, not {type(text).__name__}: {text!r}")
    name, _, rest = text.strip().partition(":")
    settings: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not key or not value:
            raise PolicyError(f"policy {text!r}: write key=value, not {part!r}")
        if key in settings:
            raise PolicyError(f"policy {text!r}: {key!r} is given twice")
        settings[key] = value
    return name.strip(), settings


def lookup(registry: dict[str, type[T]], name: str, what: str) -> type[T]:
    """Return the class registered under a name.

    Raises:
        PolicyError: an unknown name; lists the known ones.
    """
    if name in registry:
        return registry[name]
    close = difflib.get_close_matches(name, registry, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise PolicyError(f"unknown {what} {name!r}{hint}; known: {', '.join(sorted(registry))}")


def build_policy(cls: type[T], settings: dict[str, str]) -> T:
    """Build a frozen dataclass from string settings, converted by the fields' annotations.

    Raises:
        PolicyError: an unknown key, or a value of the wrong kind; lists the known keys.
    """
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    name = getattr(cls, "name", cls.__name__)
    values: dict[str, Any] = {}
    for key, text in settings.items():
        if key not in known:
            keys = ", ".join(known) or "none"
            raise PolicyError(f"policy {name!r} has no setting {key!r}; its settings: {keys}")
        values[key] = _convert(name, key, text, hints[key])
    missing = [
        f.name
        for f in known.values()
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in values
    ]
    if missing:
        raise PolicyError(f"policy {name!r} needs {', '.join(missing)}: {name}:{missing[0]}=...")
    return cls(**values)


def _convert(name: str, key: str, text: str, hint: Any) -> Any:
    options = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    for option in options:
        if option is type(None) and text.lower() in ("none", "null"):
            return None
        if typing.get_origin(option) is Literal and text in map(str, typing.get_args(option)):
            return next(v for v in typing.get_args(option) if str(v) == text)
        if option is bool and text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
        if option in (int, float):
            try:
                return option(text.replace("_", "") if option is int else text)
            except ValueError:
                continue
        if typing.get_origin(option) is tuple:
            return tuple(filter(None, (part.strip() for part in text.split("|"))))
    if str in options:
        return text
    kinds = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise PolicyError(f"policy {name!r}: {key}={text!r} is not {kinds}")
