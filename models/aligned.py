"""aligned: a cache from which whole spans leave, all of their tokens in every layer or none.

Its slots lie in order of position and are the same for all heads, so a span is a range of slots in
every layer. It scores as H2O does (column sums of the attention that it computes anyway), which is
where the importance of a message comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvevict.cache import EvictionCache
from kvevict.errors import BudgetError, CacheError, UnsupportedModelError
from kvevict.models import ordered
from kvevict.models.releases import cache_argument
from kvevict.models.rope import Rope
from kvevict.plan import Plan
from kvevict.policies import H2O, Random
from kvevict.ranked import RankedLayer


@dataclass(frozen=True)
class Piece:
    """A span that is stored.

    Attributes:
        ids: its tokens.
        start: position of its first token.
        born: tokens that the cache had been fed before it.
    """

    ids: tuple[int, ...]
    start: int
    born: int = 0

    @property
    def stop(self) -> int:
        """One past the position of its last token."""
        return self.start + len(self.ids)


class MessageAlignedCache(EvictionCache):
    """Keys and values of one sequence, in pieces that leave whole.

    It is fed by its own methods alone. A forward that fails leaves it as it was, but for the scores
    that some layers have added.

    Args:
        model: a patched model, full attention in every layer.
        capacity: most tokens ever stored; feeding more is refused rather than cut.

    Attributes:
        pieces: what is stored, in order.
        fed_tokens: tokens computed so far.

    Raises:
        UnsupportedModelError: a layer without full attention.
    """

    pieces: list[Piece]

    def __init__(self, model: Any, capacity: int) -> None:
        super().__init__(model, H2O(heavy=capacity, recent=0), positions="original")
        if not all(isinstance(x, RankedLayer) for x in self.layers):
            raise UnsupportedModelError(
                f"{self._config.model_type}: whole messages leave only where every layer has full "
                "attention"
            )

    # -- what is stored ---------------------------------------------------------------------------

    @property
    def stored(self) -> int:
        """Tokens stored."""
        return sum(len(p.ids) for p in self.pieces)

    @property
    def ids(self) -> tuple[int, ...]:
        """All stored tokens in order."""
        return tuple(i for p in self.pieces for i in p.ids)

    @property
    def next_position(self) -> int:
        """The position that the next token gets."""
        assert isinstance(self._row_seen, int)
        return self._row_seen

    @property
    def contiguous(self) -> bool:
        """Whether positions have no gaps."""
        stops = accumulate(len(p.ids) for p in self.pieces)
        return all(p.stop == s for p, s in zip(self.pieces, stops, strict=True)) and (
            self.next_position == self.stored
        )

    def ranges(self) -> list[slice]:
        """Return the slots of each piece."""
        stops = list(accumulate(len(p.ids) for p in self.pieces))
        return [slice(s - len(p.ids), s) for p, s in zip(self.pieces, stops, strict=True)]

    def mass(self) -> Tensor:
        """Return the attention that every stored token received, float64 `[stored]`, all heads."""
        total = torch.zeros(self.stored, dtype=torch.float64)
        for layer in self.ranked_layers():
            total += layer.score[0, :, : layer.length].sum(0).double().cpu()
        return total

    def exposure(self) -> Tensor:
        """Return the queries that could read every stored token, float64 `[stored]`."""
        born = [p.born + i for p in self.pieces for i in range(len(p.ids))]
        return self.fed_tokens - torch.tensor(born, dtype=torch.float64)

    # -- what may be done -------------------------------------------------------------------------

    def append(
        self, ids: Sequence[int], *, chunk: int = 256, logits: int = 1, extend: bool = False
    ) -> Tensor | None:
        """Feed a span behind all that is stored.

        Args:
            ids: its tokens.
            chunk: tokens a forward.
            logits: of how many of its last tokens to return, at least 1; those of others are not
                computed.
            extend: whether it is the rest of the last piece.

        Returns:
            float32 `[logits, V]`; None for no tokens.

        Raises:
            BudgetError: more tokens than fit; nothing was fed.
        """
        return self.append_all([ids], chunk=chunk, logits=logits, extend=extend)

    def append_all(
        self,
        parts: Sequence[Sequence[int]],
        *,
        chunk: int = 256,
        logits: int = 1,
        extend: bool = False,
    ) -> Tensor | None:
        """Feed spans behind all that is stored, in forwards that do not stop at their borders.

        Args and returns as `append`; `extend` is about the first part.

        Raises:
            BudgetError: more tokens than fit; nothing was fed.
            ValueError: a chunk or a number of logits below 1.
        """
        for name, value in (("chunk", chunk), ("logits", logits)):
            if value < 1:
                raise ValueError(f"{name}={value}: give at least 1")
        spans = [tuple(int(i) for i in p) for p in parts]
        ids = [i for p in spans for i in p]
        if not ids:
            return None
        if self.stored + len(ids) > (self.capacity or 0):
            raise BudgetError(
                f"{self.stored} tokens are stored and {len(ids)} are to come, {self.capacity} fit: "
                "evict first, or give a larger budget",
                self.stored + len(ids),
            )
        start, born = self.next_position, self.fed_tokens
        point = self.checkpoint()
        self._feeding = True
        try:
            out = self._feed(ids, chunk, logits)
        except BaseException:  # also an interrupt: whole chunks may be stored, and half of one
            for layer in self.ranked_layers():
                layer._chunk = None
            self._open = False
            self.restore(point)
            raise
        finally:
            self._feeding = False
        for index, part in enumerate(spans):
            if index == 0 and extend and self.pieces and self.pieces[-1].stop == start:
                self.pieces[-1] = replace(self.pieces[-1], ids=self.pieces[-1].ids + part)
            elif part:
                self.pieces.append(Piece(part, start, born))
            start, born = start + len(part), born + len(part)
        self.fed_tokens += len(ids)
        return out

    def _feed(self, ids: Sequence[int], chunk: int, logits: int) -> Tensor:
        model = self._of_model()
        device = model.get_input_embeddings().weight.device
        outs: list[Tensor] = []
        left = len(ids)
        with torch.no_grad():
            for part in torch.tensor(ids, device=device).split(chunk):
                left -= len(part)
                wanted = max(logits - left, 0)  # of this chunk
                given: dict[str, Any] = {cache_argument(model): self, "use_cache": True}
                given["logits_to_keep"] = max(min(wanted, len(part)), 1)  # 0 would be all
                out = model(input_ids=part[None], **given).logits[0].float()
                outs += [out] if wanted else []
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    @contextmanager
    def unscored(self) -> Iterator[None]:
        """Feed without scoring, which is about half of a long context's attention.

        What is stored gets no more attention mass and what is fed has none.
        """
        layers = self.ranked_layers()
        policy = layers[0].policy
        try:
            for layer in layers:
                layer.policy = Random(self.capacity or 1)  # of this capacity too, and reads none
            yield
        finally:
            for layer in layers:
                layer.policy = policy

    def regroup(self, parts: Sequence[Sequence[int]]) -> None:
        """Say anew where one span ends and the next begins, of tokens without gaps.

        Raises:
            CacheError: other tokens than those stored, or gaps between them.
        """
        if tuple(i for p in parts for i in p) != self.ids or not self.contiguous:
            raise CacheError("regroup() needs the stored tokens themselves, without gaps")
        born = [p.born + i for p in self.pieces for i in range(len(p.ids))]
        starts = list(accumulate((len(p) for p in parts), initial=0))
        self.pieces = [
            Piece(tuple(p), s, born[s]) for p, s in zip(parts, starts, strict=False) if len(p)
        ]

    def drop(self, places: Sequence[int]) -> None:
        """Let pieces go: their keys and values in every layer, nothing else changes."""
        gone = set(places)
        if not gone:
            return
        keep = torch.ones(self.stored, dtype=torch.bool)
        for index, part in enumerate(self.ranges()):
            if index in gone:
                keep[part] = False
        ordered.take(self.ranked_layers(), keep.nonzero()[:, 0])
        self.pieces = [p for i, p in enumerate(self.pieces) if i not in gone]

    def rewind(self, tokens: int) -> None:
        """Forget all but the first `tokens` stored, and go on from the position behind them."""
        if not 0 <= tokens <= self.stored:
            raise CacheError(f"cannot rewind {self.stored} stored tokens to {tokens}")
        ordered.cut(self.ranked_layers(), tokens)
        left, kept = tokens, []
        for piece in self.pieces:
            if left:
                kept.append(replace(piece, ids=piece.ids[:left]))
                left -= len(kept[-1].ids)
        self.pieces = kept
        self._go_on_at(kept[-1].stop if kept else 0)

    def close_gaps(self) -> int:
        """Turn every key to its rank, so that positions have no gaps; return the tokens turned."""
        starts = [r.start for r in self.ranges()]
        turned = sum(len(p.ids) for p, s in zip(self.pieces, starts, strict=True) if p.start != s)
        if turned:
            ordered.turn(self._turning(), torch.arange(self.stored))
        self.pieces = [replace(p, start=s) for p, s in zip(self.pieces, starts, strict=True)]
        self._go_on_at(self.stored)
        return turned

    def insert(self, place: int, ids: Sequence[int], *, chunk: int = 256) -> None:
        """Compute a span in front of piece `place`, which reads only what stands before it.

        What follows keeps its keys and values: it read what stood there before. Where the span is
        longer than the gap, what follows is turned to later positions.
        """
        if self.stored + len(ids) > (self.capacity or 0):
            raise BudgetError(f"{len(ids)} more tokens do not fit", self.stored + len(ids))
        tail, end = self.pieces[place:], self.next_position
        cut = self.ranges()[place].start if tail else self.stored
        saved = [
            tuple(
                s[:, :, cut : self.stored].clone() for s in (x.keys, x.values, x.position, x.score)
            )
            for x in self.ranked_layers()
        ]
        self.rewind(cut)
        self.append(ids, chunk=chunk)
        first = self.stored
        for layer, states in zip(self.ranked_layers(), saved, strict=True):
            span = slice(first, first + states[0].shape[2])
            for buffer, state in zip(
                (layer.keys, layer.values, layer.position, layer.score), states, strict=True
            ):
                buffer[:, :, span] = state
            layer.length = span.stop
        tail = [replace(p, born=p.born + len(ids)) for p in tail]  # these queries did not see it
        shift = max(0, self.pieces[-1].stop - tail[0].start) if tail else 0
        position = self.ranked_layers()[0].position[0, 0, : first + sum(len(p.ids) for p in tail)]
        target = position.clone()
        target[first:] += shift
        self.pieces += tail
        if shift:
            ordered.turn(self._turning(), target)
            self.pieces[place + 1 :] = [replace(p, start=p.start + shift) for p in tail]
        self._go_on_at(max(end + shift, self.pieces[-1].stop))

    # -- token level, for comparison: other slots in every head ------------------------------------

    def keep_tokens(self, keeps: Sequence[Tensor], close_gaps: bool = False) -> None:
        """Keep other tokens in every layer and head; the pieces are then no longer known.

        Args:
            keeps: bool `[H, stored]` a layer, equally many True in every head.
            close_gaps: whether keys are turned to their rank among what is kept.

        Raises:
            CacheError: heads that keep different numbers of tokens.
        """
        for layer, keep in zip(self.ranked_layers(), keeps, strict=True):
            counts = keep.sum(-1)
            if int(counts.min()) != int(counts.max()):
                raise CacheError("every head of a layer must keep equally many tokens")
            order = keep.nonzero()[:, 1].view(keep.shape[0], -1).to(layer.keys.device)  # [H, n]
            ordered.pick(layer, order)
        if close_gaps:
            ordered.turn(self._turning(), torch.arange(self.ranked_layers()[0].length))
            self._go_on_at(self.ranked_layers()[0].length)
        self.pieces = [Piece((-1,) * self.ranked_layers()[0].length, 0)]

    def checkpoint(self) -> tuple[list[Piece], int, int, int]:
        """Return where the cache stands, for `restore` after more was fed."""
        length = self.ranked_layers()[0].length
        return list(self.pieces), length, self.next_position, self.fed_tokens

    def restore(self, point: tuple[list[Piece], int, int, int]) -> None:
        """Forget what was fed since a checkpoint; scores keep what its queries added."""
        self.pieces, length, position, self.fed_tokens = list(point[0]), *point[1:]
        ordered.cut(self.ranked_layers(), length)
        self._go_on_at(position)

    # -- inside -----------------------------------------------------------------------------------

    def _of_model(self) -> Any:
        model = self._model()
        if model is None:
            raise CacheError("the model of this cache is gone")
        return model

    def _start_over(self) -> None:
        super()._start_over()
        self.pieces = []
        self.fed_tokens = 0
        self._feeding = False

    def save(self, folder: Any) -> None:
        """Refuse: `ids` appended to a new cache give it again.

        Raises:
            CacheError: always.
        """
        raise CacheError("a message-aligned cache is not saved: append its ids to a new one")

    def begin(self, handle: Any, rows: int, length: int, mask: Tensor | None, device: Any) -> Plan:
        """Announce a forward of one row without pads."""
        if not self._feeding:
            raise CacheError("a message-aligned cache is fed by its append(), not by the model")
        plan = super().begin(handle, rows, length, mask, device)
        if rows != 1 or plan.padded:
            raise CacheError("a message-aligned cache holds one row without pads")
        return plan

    def ranked_layers(self) -> list[RankedLayer]:
        """Return the layers."""
        return [x for x in self.layers if isinstance(x, RankedLayer)]

    def _go_on_at(self, position: int) -> None:
        self._row_seen = self._seen = position
        for layer in self.ranked_layers():
            layer.seen = position

    def _turning(self) -> list[tuple[RankedLayer, Rope]]:
        """Return the layers with their rotations.

        Raises:
            UnsupportedModelError: a layer whose rotation was not found.
        """
        ropes = self._of_model()._kvevict.findings.ropes
        if any(rope is None for rope in ropes):
            raise UnsupportedModelError(
                f"{self._config.model_type}: closing gaps needs a rotary embedding that shifts"
            )
        return list(zip(self.ranked_layers(), ropes, strict=True))
