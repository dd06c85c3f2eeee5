"""patch: make a transformers model run with an eviction cache; reversible, per instance.

What it does to a model: registers one attention function with transformers and selects it, puts a
hook before and one after the base model's forward, and wraps steps of `generate` on the instance
(see `wraps`; with a policy `_prepare_cache_for_generation` too). No modeling file is edited and no
module patched.
"""

import inspect
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvevict.cache import Backend, EvictionCache, EvictionLayer, Positions
from kvevict.errors import PolicyError, UnsupportedModelError
from kvevict.kernels.dispatch import resolve_backend
from kvevict.models import attention
from kvevict.models.decoder import base_model, check_model
from kvevict.models.placement import input_device
from kvevict.models.probe import Findings, probe
from kvevict.models.releases import cache_argument, renamed
from kvevict.models.selfcheck import self_check
from kvevict.models.wraps import announcing_drafts, ending_drafts, keeping_cache
from kvevict.policy import Policy, parse

__all__ = ["Patch", "patch"]

_WRAPPED = (
    "_prepare_cache_for_generation",
    "prepare_inputs_for_generation",
    "generate",
    "_get_candidate_generator",
    "init_continuous_batching",
)


def patch(
    model: Any,
    policy: Policy | str | None = None,
    *,
    positions: Positions = "auto",
    backend: Backend = "auto",
    evict_every: int = 1,
) -> "Patch":
    """Patch a model, as a context manager or until `unpatch()`.

    Args:
        model: a decoder-only transformers model.
        policy: what every `generate` and pipeline call gets a fresh cache for; None: bring the
            cache yourself. A bare `model(ids)` gets transformers' own cache either way.
        positions: "auto", "in_cache" or "original"; see `EvictionCache`.
        backend: "auto", "torch" or "triton".
        evict_every: see `EvictionCache`.

    Returns:
        The handle; `handle.unpatch()` leaves the model as it was. Patching a patched model again
        without a policy returns the handle in force, and a `with` block inside another leaves the
        outer one's patch in place.

    Raises:
        PolicyError: bad settings, or the model is patched with another policy.
        UnsupportedModelError: what is missing in the model, by name.
    """
    policy = None if policy is None else parse(policy)
    present = getattr(model, "_kvevict", None)
    if present is not None:
        if policy is None or (policy, positions, backend, evict_every) == present.settings:
            present._again = True
            return present  # type: ignore[no-any-return]
        raise PolicyError(f"the model is patched with {present.policy}; unpatch() it first")
    return Patch(model, policy, positions, backend, evict_every)


class Patch:
    """A patched model: what was found out about it, and the way back.

    Attributes:
        model: the patched model.
        policy: the default policy of `generate`, or None.
        findings: what the probe measured.
        pads_problem: why left-padded rows are refused, or None.
    """

    pads_problem: str | None = None

    def __init__(
        self,
        model: Any,
        policy: Policy | None,
        positions: Positions,
        backend: Backend,
        evict_every: int,
    ) -> None:
        self.model = model
        self.policy = policy
        self.settings = (policy, positions, backend, evict_every)
        self._again = False  # whether patch() returned it to somebody else than its owner
        self._own = {n: model.__dict__[n] for n in _WRAPPED if n in model.__dict__}
        self._owning: list[bool] = []  # of the `with` blocks that are open
        self._previous = check_model(model)
        self._hooks: list[Any] = []
        AttentionInterface.register(attention.NAME, attention.eviction_attention)
        AttentionMaskInterface.register(attention.NAME, sdpa_mask)
        try:
            model.set_attn_implementation(attention.NAME)
            if model.config.get_text_config(decoder=True)._attn_implementation != attention.NAME:
                raise UnsupportedModelError(
                    f"{model.config.model_type}: its attention does not go through transformers' "
                    "AttentionInterface (missing part: the bridge), so nothing can be evicted"
                )
            self.findings: Findings = probe(model)
            base = base_model(model)
            self._hooks = [
                base.register_forward_pre_hook(self._before, with_kwargs=True),
                base.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]
            self._names = list(inspect.signature(type(base).forward).parameters)[1:]
            model._kvevict = self
            self._wrap(cache_argument(model))
            self.pads_problem = self_check(model, cache_argument(model))
            if policy is not None:
                # Shows bad settings and missing parts now rather than at the first forward.
                EvictionCache(
                    model, policy, positions=positions, backend=backend, evict_every=evict_every
                )
                model._prepare_cache_for_generation = self._prepare_cache
        except BaseException:
            self.unpatch()
            raise

    def __enter__(self) -> Self:
        self._owning.append(not self._again)
        self._again = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._owning.pop():
            self.unpatch()

    def unpatch(self) -> None:
        """Leave the model as it was before; does nothing the second time."""
        for hook in self._hooks:
            hook.remove()
        for name in _WRAPPED if self._hooks else ():
            self.model.__dict__.pop(name, None)
        self.model.__dict__.update(self._own if self._hooks else {})
        self._hooks = []
        self.model.__dict__.pop("_kvevict", None)
        if self.model.config.get_text_config(decoder=True)._attn_implementation == attention.NAME:
            self.model.set_attn_implementation(self._previous)

    def new_cache(self) -> EvictionCache:
        """Return a fresh cache under the default policy.

        Raises:
            PolicyError: patched without a policy.
        """
        policy, positions, backend, evict_every = self.settings
        if policy is None:
            raise PolicyError("patched without a policy: give patch() one or make EvictionCache")
        return EvictionCache(
            self.model, policy, positions=positions, backend=backend, evict_every=evict_every
        )

    # -- what the cache asks ----------------------------------------------------------------------

    @property
    def position_limit(self) -> int | None:
        """Positions that may be fed before the cache rebases, where the rope type bounds them."""
        return self.findings.position_limit

    def settle_positions(
        self, policy: Policy, asked: str, layers: list[Any]
    ) -> tuple[str, list[Any]]:
        """Resolve "auto", and return the rotation of every layer where one is needed.

        Raises:
            UnsupportedModelError: in-cache positions on a model whose rotation was not found.
        """
        ours = [i for i, x in enumerate(layers) if isinstance(x, EvictionLayer)]
        none: list[Any] = [None] * len(layers)
        extents = policy.extents
        if extents is None:
            return ("original" if asked == "auto" else asked), none
        ranked = policy.band is None
        if asked == "original" or (asked == "auto" and ranked):
            return "original", none
        missing = [i for i in ours if self.findings.ropes[i] is None]
        problem = self.findings.in_cache_problem
        if (missing or problem) and asked == "auto" and not extents[0]:
            return "original", none
        if problem:
            raise UnsupportedModelError(
                f"{self.model.config.model_type}: no positions inside the cache, {problem} "
                '(missing part: positions); use positions="original" within the trained length'
            )
        if missing:
            raise UnsupportedModelError(
                f"{self.model.config.model_type}: positions inside the cache need a rotary "
                f"embedding that shifts (missing part: positions, layers {missing}); use "
                'positions="original" within the trained length'
            )
        if ranked and len(ours) != len(layers):
            raise UnsupportedModelError(
                f"{self.model.config.model_type}: {policy.name} with positions inside the cache "
                "needs every layer to have full attention (missing part: positions); use "
                'positions="original"'
            )
        limit = self.findings.position_limit
        reach = extents[0] + (policy.band or extents[1] + extents[2])
        if limit is not None and reach >= limit:
            raise UnsupportedModelError(
                f"{self.model.config.model_type}: its rope scaling changes beyond {limit} "
                f"positions and the budget is {reach}; use a smaller budget"
            )
        return "in_cache", [self.findings.ropes[i] for i in range(len(layers))]

    def settle_backend(self, asked: str) -> str:
        """Return the backend that runs.

        Raises:
            UnsupportedModelError: an explicit "triton" that cannot run here.
        """
        sizes = sorted(self.findings.head_dims)
        fits = all(size % 8 == 0 and size <= 256 for size in sizes)
        if asked == "triton" and not fits:
            raise UnsupportedModelError(
                f"{self.findings.model_type}: the Triton kernels take head dims up to 256 in "
                f'multiples of 8, not {sizes}; use backend="torch" or "auto"'
            )
        try:
            found = resolve_backend(asked, input_device(self.model))
        except RuntimeError as error:
            raise UnsupportedModelError(str(error)) from error
        return found if fits else "torch"

    # -- hooks ------------------------------------------------------------------------------------

    def _before(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        kwargs = renamed(kwargs, cache_argument(self.model))  # else an older release drops it
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if not isinstance(cache, EvictionCache):
            attention.forward_cache.set(None)
            return None
        if cache.static:  # announced by the compiled step itself
            return None
        if kwargs.get("output_attentions") or getattr(base.config, "output_attentions", False):
            raise UnsupportedModelError(
                "output_attentions=True: fused attention returns no weights; the cache's scores() "
                "has their sums under h2o"
            )
        new = kwargs.get("input_ids")
        new = kwargs.get("inputs_embeds") if new is None else new
        if new is None:
            raise UnsupportedModelError("an eviction cache needs input_ids or inputs_embeds")
        mask = kwargs.get("attention_mask")
        if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim != 2):
            raise UnsupportedModelError(
                "a prepared 4D attention mask with an eviction cache: give the 2D mask"
            )
        given = kwargs.get("position_ids")
        if isinstance(given, Tensor) and given.ndim > 2:
            raise UnsupportedModelError(
                f"{self.model.config.model_type}: positions of several dimensions, as for images "
                "and time (missing part: positions)"
            )
        plan = cache.begin(self, new.shape[0], new.shape[1], mask, new.device)
        if plan.padded:
            self._check_padded(cache, mask, plan.seen + plan.length)
        kwargs["position_ids"] = cache.fed(plan).expand(new.shape[0], -1)
        if all(isinstance(layer, EvictionLayer) for layer in cache.layers):
            # A 4D mask is handed through untouched, and our attention ignores it.
            kwargs["attention_mask"] = torch.zeros((1, 1, 1, 1), device=new.device)
        attention.forward_cache.set(cache)
        return (), kwargs

    def _after(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if isinstance(cache, EvictionCache) and not cache.static:
            attention.forward_cache.set(None)
            if output is not None:  # None: the forward raised
                cache.finish()

    def _check_padded(self, cache: EvictionCache, mask: Tensor | None, columns: int) -> None:
        """Refuse pads that this model, or its layers of transformers' own, would not leave out."""
        if self.pads_problem is not None:
            raise UnsupportedModelError(f"{self.pads_problem}: feed rows of equal length")
        stock = any(not isinstance(layer, EvictionLayer) for layer in cache.layers)
        if stock and (mask is None or mask.shape[1] != columns):
            raise UnsupportedModelError(
                f"{self.model.config.model_type}: beside layers of transformers' own a padded "
                f"batch needs the whole attention_mask at every step, {columns} columns"
            )

    def _refuse_paging(self, *args: Any, **kwargs: Any) -> Any:
        """Stop continuous batching, which would page its own cache past the policy."""
        raise UnsupportedModelError(
            "continuous batching has a paged cache of its own, to which no policy applies; use "
            "generate(), or unpatch() the model"
        )

    def _wrap(self, name: str) -> None:
        model = self.model
        model.prepare_inputs_for_generation = keeping_cache(
            model.prepare_inputs_for_generation, model, name
        )
        model.init_continuous_batching = self._refuse_paging
        model.generate = ending_drafts(model.generate, name)
        model._get_candidate_generator = announcing_drafts(
            model._get_candidate_generator, model, name
        )

    def _prepare_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Give a generate call a fresh cache, unless the caller brought one."""
        stock = type(self.model)._prepare_cache_for_generation
        name = cache_argument(self.model)
        cache = model_kwargs.get(name)
        if cache is None and generation_config.use_cache is not False:
            if generation_config.cache_implementation is not None:
                raise UnsupportedModelError(
                    f"cache_implementation={generation_config.cache_implementation!r} on a model "
                    f"patched with {self.policy}: leave it out, or unpatch() the model"
                )
            cache = model_kwargs[name] = self.new_cache()
        if isinstance(cache, EvictionCache):
            cache.settle_length(_prompt_length(generation_config, model_kwargs))
        return stock(self.model, generation_config, model_kwargs, *args, **kwargs)


def _prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int:
    """Return the longest row's tokens without pads."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        return int(mask.sum(-1).max())
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        return int(positions.max()) + 1
    return int(getattr(generation_config, "_mask_length", 0) or 0)
