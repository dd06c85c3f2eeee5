"""session: a chat on a patched model whose history a message policy edits between turns.

The cache follows the edited history in the way that the caller chose (see `realise`); what each
turn computed again is reported.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvevict.agent.formats import to_normal
from kvevict.agent.history import History
from kvevict.agent.manager import HistoryManager
from kvevict.agent.message_policy import MessagePolicy
from kvevict.agent.store import Store
from kvevict.errors import BudgetError, HistoryError, NotPatchedError, PolicyError
from kvevict.models.aligned import MessageAlignedCache
from kvevict.models.counters import SpanCounter, message_key
from kvevict.models.message_scores import (
    Aggregate,
    check_aggregate,
    message_scores,
    token_scores,
)
from kvevict.models.realise import check_realisation, realise, staying
from kvevict.models.spans import Rendered, Turn, render

Scores = Callable[[History], Sequence[float]]
Choose = Callable[[Tensor], int]


@dataclass(frozen=True)
class TurnReport:
    """What one `generate` took, in tokens.

    Attributes:
        context: stored when the first token of the answer was chosen.
        new: of these, text that no earlier turn had.
        recomputed: old text that was computed again, a policy's own text among it.
        evicted: tokens of messages that left or changed.
        turned: tokens whose keys were turned to another position.
        generated: the answer.
        stages: what the policy did.
    """

    context: int
    new: int
    recomputed: int
    evicted: int
    turned: int
    generated: int
    stages: tuple[str, ...] = ()


class AgentSession:
    """A running chat or agent with a bounded cache.

    Args:
        model: a patched model, full attention in every layer.
        tokenizer: with a chat template.
        policy: a message policy or its string.
        window: most tokens in the cache, answer included, and no more than the model has positions;
            also the policy's W.
        max_output: most tokens of an answer; the policy's O.
        realisation: "kv" (what leaves takes its keys and values along), "kv_reindex" (and positions
            close up) or "text" (all is computed again from the first change on).
        score: importance of messages, for policies that rank by it: "rules" (their kind), or
            "attention" (what the model itself looked at, from the cache's sums), or a callable
            from a `History` to a number a message, such as an LLM judge.
        aggregate: with "attention": "sum", "density" or "topk".
        summarizer: as `HistoryManager` takes it.
        tools: declarations for the chat template.
        store: where externalised texts go, as `HistoryManager` takes it.
        chunk: tokens a forward.

    Attributes:
        model: the model.
        messages: the whole uncut history, as chat-template messages.
        cache: the cache.
        manager: the manager, whose `state` is the edit log.
        reports: a `TurnReport` a turn.

    Raises:
        NotPatchedError: a model that is not patched.
        PolicyError: an unknown policy, realisation, score or aggregate, or numbers out of range.
        UnsupportedModelError: a layer without full attention.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy: str | MessagePolicy = "window",
        *,
        window: int = 4096,
        max_output: int = 256,
        realisation: str = "kv",
        score: str | Scores = "rules",
        aggregate: Aggregate = "sum",
        summarizer: str | Callable[..., Any] = "extractive",
        tools: Sequence[Any] | None = None,
        store: Store | str | None = None,
        chunk: int = 256,
    ) -> None:
        if getattr(model, "_kvevict", None) is None:
            raise NotPatchedError("the model is not patched: call kvevict.patch(model) first")
        check_realisation(realisation)
        if not callable(score) and score not in ("rules", "attention"):
            raise PolicyError(f"score {score!r}: give rules, attention or a callable")
        if not 0 < max_output < window:
            raise PolicyError(f"max_output={max_output}: give 1 to {window - 1} (window - 1)")
        if chunk < 1:
            raise PolicyError(f"chunk={chunk}: give the tokens of a forward, at least 1")
        reach = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if reach is not None and window > reach:
            raise PolicyError(f"window={window}: the model has {reach} positions, give no more")
        check_aggregate(aggregate)
        self.model = model
        self.messages: list[Turn] = []
        self.reports: list[TurnReport] = []
        self.max_output = max_output
        self.realisation = realisation
        self._tokenizer, self._tools, self._chunk = tokenizer, tools, chunk
        self._counter = SpanCounter(tokenizer)
        self._aggregate: Aggregate = aggregate
        self._attention: dict[tuple[object, ...], float] = {}
        self._view: list[Turn] = []  # what the cache holds, message by message
        self._new: list[Turn] = []
        self._style: str | None = None
        self.cache = MessageAlignedCache(model, window)
        scores: Scores | None = self._by_attention if score == "attention" else None
        self._scored = score == "attention"
        self.manager = HistoryManager(
            policy,
            "hf",
            window,
            max_output + self._prompt_tokens(),
            self._counter,
            summarizer,
            store,
            scores=score if callable(score) else scores,
        )

    def append(self, messages: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add messages to the history; nothing is computed before `generate`.

        Raises:
            HistoryError: a message that cannot be read; nothing was added.
        """
        given = [messages] if isinstance(messages, Mapping) else list(messages)
        to_normal([*self.messages, *given], "hf")
        self.messages += copy.deepcopy([dict(m) for m in given])
        self._new += self.messages[len(self.messages) - len(given) :]

    def generate(
        self,
        max_new_tokens: int | None = None,
        choose: Choose | None = None,
        parse: Callable[[str], Turn] | None = None,
    ) -> Turn:
        """Let the policy act, bring the cache along, and answer.

        Args:
            max_new_tokens: at most `max_output`, which it is if None.
            choose: from logits float32 `[V]` to the next token; greedy if None.
            parse: from the answer's text to the assistant's message, tool calls and all; where the
                template renders it otherwise than the model wrote it, the next turn computes it
                again, and says so.

        Returns:
            The assistant's message, which is also appended to the history.

        Raises:
            BudgetError: the policy's roots and the answer do not fit the window; the history is
                unchanged and the cache still holds the last turn. What the policy did stays in
                `manager.state`, so that a summary is not paid for twice.
            HistoryError: nothing to answer, a history that the template cannot render, or a
                `parse` that gives no assistant's message; what was answered is forgotten.
            ValueError: a `max_new_tokens` below 1.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: give at least 1, or None")
        if not self.messages or self.messages[-1]["role"] == "assistant":
            raise HistoryError("nothing to answer: append a user's message or a tool's result")
        most = min(max_new_tokens or self.max_output, self.max_output)
        fresh = self._learn()
        prepared = self.manager.prepare(self.messages)
        view = list(prepared.messages)
        rendered = self._render(view, prompt=True)
        if len(rendered.ids) + most > (self.cache.capacity or 0):
            raise BudgetError(
                f"{len(rendered.ids)} tokens stay under {self.manager.policy} and {most} are to be "
                f"written, the window is {self.cache.capacity}: give a larger window or a policy "
                "that frees more",
                len(rendered.ids) + most,
            )
        parts = [p for p in rendered.parts() if p]
        new = _trailing(parts, fresh, bool(rendered.tail))
        done = realise(self.cache, parts, self._how(parts, new, most), new=new, chunk=self._chunk)
        self._view, self._new = view, []
        context = self.cache.stored
        ids = self._write(done.logits, most, choose or _greedy, bool(rendered.tail))
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        message = parse(text) if parse else {"role": "assistant", "content": text}
        self._finish(message)
        self.reports.append(
            TurnReport(
                context,
                done.appended,
                done.recomputed,
                done.dropped,
                done.turned,
                len(ids),
                prepared.report.stages,
            )
        )
        return message

    # -- inside -----------------------------------------------------------------------------------

    def _render(self, messages: list[Turn], prompt: bool = False) -> Rendered:
        """Render in the style of the turn before where it can, so that stored parts stay equal."""
        found: Rendered | None = None
        for style in dict.fromkeys((self._style, None)):
            try:
                found = render(
                    messages,
                    self._tokenizer,
                    tools=self._tools,
                    generation_prompt=prompt,
                    style=style,
                )
                break
            except HistoryError:
                if style is None:
                    raise
        assert found is not None
        self._style = found.style
        return found

    def _prompt_tokens(self) -> int:
        """Return the tokens by which the template opens an answer."""
        return render(
            [{"role": "user", "content": "x"}], self._tokenizer, generation_prompt=True
        ).tail

    def _learn(self) -> list[tuple[int, ...]]:
        """Count what the policy will look at, note its attention; return the new parts."""
        shown = [*self._view, *self._new]
        rendered = self._render(shown)
        parts = rendered.parts()
        history = to_normal(shown, "hf")
        self._counter.learn(history.messages, (s.size for s in rendered.spans))
        if self._scored and self.cache.stored:
            self._note_attention(history, parts)
        return [p for p in parts[len(self._view) :] if p]

    def _note_attention(self, history: History, parts: list[tuple[int, ...]]) -> None:
        scores = token_scores(self.cache.mass().numpy(), self.cache.exposure().numpy())
        spans = [(r.start, r.stop) for r in self.cache.ranges()]
        found = message_scores(scores, spans, self._aggregate)
        known = {p.ids: float(x) for p, x in zip(self.cache.pieces, found, strict=True)}
        for message, part in zip(history.messages, parts, strict=False):
            if part in known:
                self._attention[message_key(message)] = known[part]

    def _by_attention(self, history: History) -> list[float]:
        """Return what each message's tokens were looked at; what was not read yet comes first."""
        unread = max(self._attention.values(), default=0.0) + 1.0
        return [self._attention.get(message_key(m), unread) for m in history.messages]

    def _how(self, parts: Sequence[tuple[int, ...]], new: int, most: int) -> str:
        """Return the realisation of this turn.

        `kv` leaves gaps, so positions grow for ever; the turn that would leave the range that the
        model was trained for closes them.
        """
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if self.realisation != "kv" or limit is None:
            return self.realisation
        stay = staying(self.cache, parts[: len(parts) - new])
        ahead = sum(len(p) for i, p in enumerate(parts) if i not in stay.values()) + most
        return "kv" if self.cache.next_position + ahead <= limit else "kv_reindex"

    def _write(self, logits: Tensor | None, most: int, choose: Choose, opened: bool) -> list[int]:
        """Write the answer token by token, behind its opening if any; its end mark is not fed."""
        assert logits is not None  # the last part was just fed
        ends = _ends(self.model, self._tokenizer)
        ids: list[int] = []
        while len(ids) < most:
            token = choose(logits[-1])
            if token in ends:
                break
            ids.append(token)
            logits = self.cache.append([token], extend=opened or len(ids) > 1)
            assert logits is not None
        return ids

    def _finish(self, message: Turn) -> None:
        """Keep the answer, and feed how the template ends it, where that is all that is missing."""
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            raise HistoryError(f"parse gave {message!r}: give a message of role assistant")
        kept = copy.deepcopy(dict(message))
        to_normal([*self.messages, kept], "hf")
        part = self._render([*self._view, kept]).parts()[-1]
        self.messages.append(kept)
        self._view = [*self._view, kept]
        held = self.cache.pieces[-1].ids
        rest = part[len(held) :]
        if part[: len(held)] == held and self.cache.stored + len(rest) <= (
            self.cache.capacity or 0
        ):
            self.cache.append(rest, extend=True)


def _greedy(logits: Tensor) -> int:
    return int(logits.argmax())


def _trailing(parts: Sequence[tuple[int, ...]], fresh: list[tuple[int, ...]], tail: bool) -> int:
    """Return how many parts at the end are new: the opening of the answer, and new messages.

    At least one, whose logits the answer begins with: a turn that failed left its messages stored.
    """
    left = Counter(fresh)
    count = int(tail)
    for part in reversed(parts[: len(parts) - count]):
        if not left[part]:
            break
        left[part] -= 1
        count += 1
    return max(count, 1)


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer."""
    config = getattr(model, "generation_config", None)
    found: list[int] = []
    for end in (getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        found += end if isinstance(end, list | tuple) else [] if end is None else [end]
    return set(found)
