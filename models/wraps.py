"""What `patch` wraps around the steps of `generate`: no cache is dropped, no draft stays open.

Each function takes a method of the model and returns one to put in its place on the instance.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from kvevict.cache import EvictionCache
from kvevict.errors import CacheError, UnsupportedModelError
from kvevict.models.releases import renamed

Method = Callable[..., Any]


def ending_drafts(generate: Method, name: str) -> Method:
    """Return `generate` that leaves no draft open behind it, and takes `cache=` in any release.

    Args:
        generate: the model's own.
        name: what this release calls a cache.
    """

    @functools.wraps(generate)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs = renamed(kwargs, name)
        caches = [kwargs.get(name)]
        try:
            made = generate(*args, **kwargs)
            caches.append(getattr(made, name, None))
            return made
        finally:
            for cache in caches:
                if isinstance(cache, EvictionCache):
                    cache.end_drafts()

    return wrapped


def announcing_drafts(make: Method, model: Any, name: str) -> Method:
    """Return `_get_candidate_generator` that tells the cache where the prompt ends.

    Args:
        make: the model's own.
        model: the patched model.
        name: what this release calls a cache.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        cache = given["model_kwargs"].get(name)
        if isinstance(cache, EvictionCache):
            _check(model, given, cache)
            cache.certain_until(given["input_ids"].shape[1])
        return make(*args, **kwargs)

    return wrapped


def _check(model: Any, given: dict[str, Any], cache: EvictionCache) -> None:
    """Refuse drafts from a model that would itself evict, and prompts that they would misread."""
    draft = given.get("assistant_model")
    if given["generation_config"].assistant_early_exit is not None:
        draft = model
    handle = getattr(draft, "_kvevict", None)
    if handle is not None and handle.policy is not None:
        raise UnsupportedModelError(
            f"the model that drafts is patched with {handle.policy}, and its own cache would have "
            "to take whole drafts back: unpatch() it, or patch() it without a policy and give the "
            "other model its cache"
        )
    if given["model_kwargs"].get("inputs_embeds") is not None:
        raise UnsupportedModelError("drafts after inputs_embeds: give input_ids")
    if getattr(given["generation_config"], "prefill_chunk_size", None) is not None:
        raise UnsupportedModelError(
            "drafts feed the prompt in one forward, whatever prefill_chunk_size says: leave it out"
        )
    columns = given["input_ids"].shape[1]
    kept = [given["model_kwargs"].get(x) for x in ("attention_mask", "position_ids")]
    whole = all(x is None or x.shape[-1] == columns for x in kept)  # generate drops a mask of ones
    if cache.seen and (cache.seen >= columns or not whole):
        raise CacheError(
            f"drafts on a cache that has seen {cache.seen} tokens, and {columns} ids: give the "
            "whole sequence, what the cache has seen and at least one token more"
        )


def keeping_cache(prepare: Method, model: Any, name: str) -> Method:
    """Return `prepare_inputs_for_generation` that stops a model which drops its cache.

    Args:
        prepare: the model's own.
        model: the patched model.
        name: what this release calls a cache.
    """

    @functools.wraps(prepare)
    def wrapped(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        given: Any = kwargs.get(name)
        ours = isinstance(given, EvictionCache)
        if ours and given.is_croppable and given.seen and kwargs.get("is_first_iteration"):
            # A kept cache: drafting feeds the whole sequence again where plain decoding does not.
            kwargs["next_sequence_length"] = input_ids.shape[1] - given.seen
        inputs = prepare(input_ids, *args, **kwargs)
        if ours and inputs.get(name) is not given:
            raise UnsupportedModelError(
                f"{model.config.model_type}: at {given.seen} tokens it drops its cache to start "
                "over with other positions; generate up to there, or use kvevict.stream"
            )
        return inputs

    return wrapped
