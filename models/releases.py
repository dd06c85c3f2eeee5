"""What differs between releases of transformers.

From 5.24 on a cache is handed over as `cache`; 5.22 and 5.23 call it `past_key_values` and drop or
refuse the other name. On a patched model `cache` works in all of them.
"""

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """Return what the model's forward calls its cache: `cache` from transformers 5.24 on."""
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def renamed(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    """Return keywords with the cache under the name that this release wants."""
    if name != "cache" and "cache" in kwargs:
        kwargs = {**kwargs}
        kwargs[name] = kwargs.pop("cache")
    return kwargs
