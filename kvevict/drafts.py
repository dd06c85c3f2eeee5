"""Drafts: tokens fed before it is known how many of them stay (assisted, prompt-lookup decoding).

While a draft is open, no evicting layer writes or evicts for its tokens. `crop` says how many stay,
and those are then entered as if they had come one by one, so a rejected token leaves no trace, not
even a rounding in a score.

Head and window attend a draft as any chunk, since order alone decides what they see. A ranked
policy chooses a victim after every token, so its draft goes through attention token by token, on a
copy of the layer's slots (the rest of the model runs once for all): what plain decoding does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvevict.errors import CacheError, PolicyError, UnsupportedModelError
from kvevict.forward import Forward
from kvevict.layers import EvictionLayer
from kvevict.ranked import RankedLayer

if TYPE_CHECKING:
    from kvevict.plan import Plan

Attend = Callable[[EvictionLayer, Tensor, Tensor, Tensor], Tensor]


class Drafts(Forward):
    """The part of an EvictionCache that holds tokens back until `crop` says which stay."""

    _known: int  # columns that no crop takes back; later ones of a forward are its draft

    @property
    def is_croppable(self) -> bool:
        """Whether forwards are drafts now; what was evicted without one cannot come back."""
        return self._drafting

    def activate_past_recording(self, **kwargs: Any) -> None:
        """Take every forward from now on as a draft, until `end_drafts`; transformers' name.

        Args:
            **kwargs: for layers of transformers' own, from release 5.25 on. How many states
                recurrent layers keep is set anew for every forward, whatever is given.

        Raises:
            UnsupportedModelError: layers of transformers' own that cannot be cropped.
            PolicyError: shares of a prompt whose length nobody gave.
        """
        if self.policy.has_shares:
            raise PolicyError(
                f"drafts under {self.policy}: its layers come to be once the prompt's length is "
                "known; call settle_length() first, or leave it to generate()"
            )
        fixed = [x for x in self.layers if not isinstance(x, EvictionLayer) and not x.is_croppable]
        if fixed:
            kinds = ", ".join(sorted({type(x).__name__ for x in fixed}))
            raise UnsupportedModelError(
                f"drafts cannot be taken back from layers of transformers' own ({kinds}): leave "
                "assistant_model and prompt_lookup_num_tokens out"
            )
        super().activate_past_recording(**kwargs)  # type: ignore[misc]
        self._drafting = True
        self._keep_states(0)

    def _keep_states(self, draft: int) -> None:
        """Tell recurrent layers, which go back by states that they keep, how long a draft is.

        transformers 5.25 asks once and for one state too few: with the whole draft rejected, its
        own caches go back to before the token that stays.
        """
        for layer in self.layers:
            recurrent = isinstance(layer, LinearAttentionCacheLayerMixin)
            if recurrent and layer.record_past:
                layer.recurrent_states_to_keep = draft + 1 if draft else 0

    def certain_until(self, columns: int) -> None:
        """Say that no crop will take back one of the first `columns`, nor the token after a crop.

        A prompt is then one chunk, attended and evicted as ever, even with a draft behind it.
        """
        self._known = columns

    def end_drafts(self) -> None:
        """Go back to plain forwards; a draft that was left open (an exception) is taken back."""
        if not self._drafting:
            self._known = 0  # the prompt's end was announced, and then it came to no draft
            return
        if self._seen and not self._broken:  # layers of transformers' own wait for a crop of 0 too
            self.crop(0 if self._draft is None else -self._draft.draft)
        self._drafting, self._known = False, 0
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def crop(self, tokens_to_remove: int) -> None:
        """Settle the open draft: all but its last tokens stay, as if fed one by one.

        Args:
            tokens_to_remove: 0 or negative: minus the tokens that go.

        Raises:
            CacheError: more than the open draft has, or none is open.
            TypeError: no whole number.
        """
        tokens_to_remove = operator.index(tokens_to_remove)
        plan = self._draft
        most = 0 if plan is None else plan.draft
        if not -most <= tokens_to_remove <= 0:
            raise CacheError(
                f"crop({tokens_to_remove}): the open draft has {most} tokens, and what was "
                "evicted before cannot come back; 0 keeps it whole, a negative number cuts its end"
            )
        self._draft = None
        stay = 0 if plan is None else plan.length + tokens_to_remove
        try:
            for layer in self.layers:
                if not isinstance(layer, EvictionLayer):
                    if self._drafting:
                        layer.crop(tokens_to_remove)
                elif plan is not None and layer.draft is not None:  # None: of another rank
                    settle(layer, plan, stay)
        except BaseException:
            self._broken = True
            raise
        if plan is not None:
            kept = plan.part(0, stay)
            self._seen = plan.seen + stay
            padded = plan.padded
            self._row_seen = kept.after(plan.position.device) if padded else plan.start + stay
            self._check_scores(kept)
        if self._known:
            self._known = self._seen + 1

    def _check_settled(self) -> None:
        """Refuse to move rows while a draft is open, before any layer has moved.

        Raises:
            CacheError: if one is open.
        """
        if self._draft is not None:
            raise CacheError("a draft is open: crop() says how much of it stays, before rows move")

    def _unsure(self, length: int) -> int:
        """Return how many of the next columns are a draft."""
        return min(length, max(0, self._seen + length - self._known)) if self._drafting else 0


class Trial(RankedLayer):
    """A copy of a ranked layer that goes ahead, and remembers the scores of every step.

    Attributes:
        trace: scores after each token was attended, before its victim was chosen.
    """

    def __init__(self, layer: RankedLayer) -> None:
        self.__dict__.update(layer.__dict__)
        for name in layer._state_names():
            state = getattr(layer, name)
            setattr(self, name, None if state is None else state.clone())
        self.trace: list[Tensor] = []

    def _free_slots(self, plan: Plan, before: bool = False) -> None:
        if not before:
            self.trace.append(self.score.clone())
        super()._free_slots(plan, before)


def token_by_token(
    layer: RankedLayer, plan: Plan, q: Tensor, k: Tensor, v: Tensor, attend: Attend
) -> Tensor:
    """Attend a forward with a draft as plain decoding would: what is certain at once, then steps.

    Args:
        layer: not changed by the draft.
        plan: of the whole forward.
        q: `[B, H*G, Q, D]`.
        k: `[B, H, Q, D]`.
        v: `[B, H, Q, D]`.
        attend: attends queries to what a layer's `update` returned, and commits the layer.

    Returns:
        What `attend` returned, together along dimension 1.
    """

    def feed(into: RankedLayer, first: int, stop: int) -> Tensor:
        into.plan = plan.part(first, stop)
        keys, values = into.update(k[:, :, first:stop], v[:, :, first:stop])
        return attend(into, q[:, :, first:stop], keys, values)

    sure = plan.length - plan.draft
    outs = [feed(layer, 0, sure)] if sure else []
    trial = Trial(layer)
    outs += [feed(trial, at, at + 1) for at in range(sure, plan.length)]
    layer.plan, layer.seen = plan, plan.seen + plan.length
    layer.draft = (k[:, :, sure:].detach().clone(), v[:, :, sure:].detach().clone(), trial.trace)
    return torch.cat(outs, 1)


def settle(layer: EvictionLayer, plan: Plan, stay: int) -> None:
    """Enter the tokens of a draft that stay.

    Args:
        layer: which attended the draft.
        plan: of the draft's forward.
        stay: columns of that forward that stay.
    """
    assert layer.draft is not None
    k, v, trace = layer.draft
    layer.draft = None
    sure = plan.length - plan.draft
    layer.seen = plan.seen + stay
    if not isinstance(layer, RankedLayer):
        layer.plan = plan.part(sure, stay)
        if stay > sure:
            layer._extend(k[:, :, : stay - sure], v[:, :, : stay - sure], layer.plan)
            layer.commit()
        return
    assert trace is not None  # a ranked layer traces every token
    for at, score in enumerate(trace[: stay - sure]):
        layer.plan = plan.part(sure + at, sure + at + 1)
        layer.update(k[:, :, at : at + 1], v[:, :, at : at + 1])
        layer.score.copy_(score)
        layer._free_slots(layer.plan)
