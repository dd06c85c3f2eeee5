"""Price tables, as data: US dollars per million tokens, with where and when each was read.

Prices change; give your own as a mapping or a JSON file where yours differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvevict.errors import KvevictError


@dataclass(frozen=True)
class Prices:
    """What a model's tokens cost, in US dollars per million.

    Attributes:
        name: name of the table.
        input: input tokens outside a prompt cache.
        cache_write: input tokens written to a cache; the price of `input` where writing is free.
        cache_read: input tokens read from a cache.
        output: tokens of the answer.
        source: where the prices were read.
        date: when, year and month.
    """

    name: str
    input: float
    cache_write: float
    cache_read: float
    output: float
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        for field in ("input", "cache_write", "cache_read", "output"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise PricesError(f"prices {self.name!r}: {field}={value!r} is no price")

    def cost(self, fresh: int, written: int, read: int, output: int) -> float:
        """Return the dollars of a call, its tokens given by kind."""
        total = fresh * self.input + written * self.cache_write + read * self.cache_read
        return (total + output * self.output) / 1e6


class PricesError(KvevictError, ValueError):
    """An unknown price table, or one that cannot be read."""


_ANTHROPIC = "Anthropic's price list (cache writes of 5 minutes)"
_OPENAI = "OpenAI's price list (cache writes are free)"
TABLE = {
    p.name: p
    for p in (
        Prices("sonnet", 3.0, 3.75, 0.30, 15.0, f"{_ANTHROPIC}, Sonnet 4 and 4.5", "2025-12"),
        Prices(
            "opus",
            5.0,
            6.25,
            0.50,
            25.0,
            f"{_ANTHROPIC}, Opus 4.5; agrees with pi's logs",
            "2025-12",
        ),
        Prices("haiku", 1.0, 1.25, 0.10, 5.0, f"{_ANTHROPIC}, Haiku 4.5", "2025-12"),
        Prices("gpt-5", 1.25, 1.25, 0.125, 10.0, f"{_OPENAI}, GPT-5", "2025-12"),
        Prices("gpt-5-mini", 0.25, 0.25, 0.025, 2.0, f"{_OPENAI}, GPT-5 mini", "2025-12"),
        Prices("gpt-4.1", 2.0, 2.0, 0.50, 8.0, f"{_OPENAI}, GPT-4.1", "2025-12"),
        Prices("free", 0.0, 0.0, 0.0, 0.0, "a model of one's own", "2025-12"),
    )
}


def get_prices(spec: str | Mapping[str, Any] | Prices) -> Prices:
    """Return a price table by name, from a mapping, or from a JSON file.

    Raises:
        PricesError: an unknown name (lists the known ones), or a table with unknown or bad fields.
    """
    if isinstance(spec, Prices):
        return spec
    if isinstance(spec, str) and spec in TABLE:
        return TABLE[spec]
    if isinstance(spec, str) and spec.endswith(".json"):
        try:
            spec = json.loads(Path(spec).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PricesError(f"prices {spec!r} cannot be read: {error}") from error
    if isinstance(spec, Mapping):
        known = {f.name for f in fields(Prices)}
        if not set(spec) <= known:
            raise PricesError(f"prices: unknown {set(spec) - known}; known: {sorted(known)}")
        try:
            return Prices(**{"name": "custom", **spec})
        except TypeError as error:
            raise PricesError(f"prices: {error}") from error
    raise PricesError(f"unknown prices {spec!r}; known: {', '.join(TABLE)}, or a .json file")
