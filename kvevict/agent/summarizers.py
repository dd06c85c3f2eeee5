"""Summarisers: callables from messages and a budget to a text, and the rules when they fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvevict.agent.extractive import Plain, extractive
from kvevict.errors import PolicyError


class Summarizer(Protocol):
    """What a summariser is: `(messages, budget) -> text` or `(text, complete)`."""

    def __call__(self, messages: SummaryInput, budget: int) -> str | tuple[str, bool] | None:
        """Summarise.

        Args:
            messages: plain role/content dicts of the span, the instruction last.
            budget: tokens that the summary may have.
        """
        ...


class SummaryInput(list[Plain]):
    """Plain messages of a span and, as the last user message, the instruction; it is a list.

    Attributes:
        prompt: the instruction, also the content of the last message ("" for none).
        headings: sections that the summary shall have.
        previous: the earlier summary that this one takes up, "" for none.
    """

    def __init__(
        self,
        messages: Iterable[Plain],
        prompt: str = "",
        headings: Sequence[str] = (),
        previous: str = "",
    ) -> None:
        super().__init__(messages)
        self.prompt = prompt
        self.headings = tuple(headings)
        self.previous = previous
        if prompt:
            self.append({"role": "user", "content": prompt})

    @property
    def span(self) -> list[Plain]:
        """The messages without the instruction."""
        return self[:-1] if self.prompt else self[:]


@dataclass(frozen=True)
class Outcome:
    """What came of one attempt: a text, or the reason why there is none."""

    text: str | None
    reason: str = ""


def attempt(
    summarizer: Summarizer | Callable[..., Any],
    messages: SummaryInput,
    budget: int,
    count: Callable[[str], int],
    limit: int,
) -> Outcome:
    """Call a summariser once; whatever goes wrong becomes a reason, never an exception.

    Failure rules: raising, None, not a text, empty, incomplete, or not smaller than what it
    replaces (gemini-cli's INFLATED).

    Args:
        summarizer: the callable.
        messages: what to summarise.
        budget: tokens that the summary may have.
        count: tokens of a text.
        limit: tokens of what the summary replaces.
    """
    try:
        answer = summarizer(messages, budget)
    except Exception as error:  # any callable of a caller: no failure of it may reach the history
        return Outcome(None, f"raised {type(error).__name__}: {error}")
    complete = True
    if isinstance(answer, tuple):
        if len(answer) != 2:
            return Outcome(None, f"returned a tuple of {len(answer)}, not (text, complete)")
        answer, complete = answer
    if answer is None:
        return Outcome(None, "returned None")
    if not isinstance(answer, str):
        return Outcome(None, f"returned {type(answer).__name__}, not a text")
    if not answer.strip():
        return Outcome(None, "returned an empty text")
    if not complete:
        return Outcome(None, "incomplete")
    tokens = count(answer)
    if tokens >= limit:
        return Outcome(None, f"inflated: {tokens} tokens for {limit}")
    return Outcome(answer)


def build_summarizer(which: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a summariser by name, or the callable itself.

    Args:
        which: "extractive", "hf:MODEL", "openai:BASE_URL[,model=NAME,timeout=60,retries=3]", or
            any callable `(messages, budget)`.

    Raises:
        PolicyError: an unknown name.
    """
    if callable(which):
        return which
    name, _, rest = which.partition(":")
    if name == "extractive" and not rest:
        return extractive
    if name == "hf" and rest:
        return HFSummarizer(rest)
    if name == "openai" and rest:
        url, *pairs = rest.split(",")
        settings = dict(pair.partition("=")[::2] for pair in pairs)
        unknown = set(settings) - {"model", "timeout", "retries"}
        if unknown or not url.startswith(("http://", "https://")):
            raise PolicyError(f"summariser {which!r}: write openai:http://HOST/v1,model=NAME")
        try:
            return OpenAISummarizer(
                url,
                model=settings.get("model", "default"),
                timeout=float(settings.get("timeout", 60)),
                retries=int(settings.get("retries", 3)),
            )
        except ValueError as error:
            raise PolicyError(f"summariser {which!r}: {error}") from None
    raise PolicyError(f"unknown summariser {which!r}; known: extractive, hf:MODEL, openai:BASE_URL")


# -- models ---------------------------------------------------------------------------------------


class HFSummarizer:
    """A local causal language model through transformers, loaded on the first call.

    Args:
        model: a folder or hub id.
        max_input: tokens of the prompt; a longer one keeps its first quarter and its end
            (LangChain's retry uses the same shares).
    """

    def __init__(self, model: str, max_input: int = 6_000) -> None:
        self.model = model
        self.max_input = max_input
        self._loaded: tuple[Any, Any] | None = None

    def __call__(self, messages: SummaryInput, budget: int) -> tuple[str, bool]:
        """Summarise greedily; complete when the model ended by itself."""
        tokenizer, model = self._load()
        prompt = "\n\n".join(f"{m['role']}: {m['content']}" for m in messages) + "\n\nassistant:"
        if tokenizer.chat_template:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        if ids.shape[1] > self.max_input:
            head = self.max_input // 4
            tail = ids[:, -(self.max_input - head) :]
            ids = type(ids)([*ids[0, :head].tolist(), *tail[0].tolist()])[None].to(ids.dtype)
        out = model.generate(ids, max_new_tokens=budget, do_sample=False)
        new = out[0, ids.shape[1] :]
        complete = bool(len(new)) and (len(new) < budget or int(new[-1]) == tokenizer.eos_token_id)
        return tokenizer.decode(new, skip_special_tokens=True).strip(), complete

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            self._loaded = (
                AutoTokenizer.from_pretrained(self.model),
                AutoModelForCausalLM.from_pretrained(self.model).eval(),
            )
        return self._loaded


class OpenAISummarizer:
    """A server that speaks OpenAI's Chat Completions, over httpx.

    Args:
        base_url: such as "http://127.0.0.1:8000/v1".
        model: the `model` of the request.
        timeout: seconds for one try.
        retries: tries in all on connection errors, time-outs, 408, 409, 429 and 5xx.
        key_variable: environment variable with the key; unset sends none.
        wait: seconds before the second try; doubles each time, with jitter, up to 30.
    """

    def __init__(
        self,
        base_url: str,
        model: str = "default",
        timeout: float = 60.0,
        retries: int = 3,
        key_variable: str = "OPENAI_API_KEY",
        wait: float = 0.5,
    ) -> None:
        if retries < 1 or timeout <= 0:
            raise ValueError(f"retries={retries}, timeout={timeout}: give at least 1 try and > 0 s")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.timeout = timeout
        self.retries = retries
        self.key_variable = key_variable
        self.wait = wait

    def __call__(self, messages: SummaryInput, budget: int) -> tuple[str, bool]:
        """Ask the server; complete when it stopped by itself.

        Raises:
            PolicyError: httpx or tenacity is missing.
            httpx.HTTPError: the server failed on the last try, or refused.
            ValueError: an answer without a text.
        """
        try:
            import httpx
            import tenacity
        except ImportError as error:
            raise PolicyError(
                f"openai: needs {error.name}: pip install 'kvevict[agents]'"
            ) from None
        body = {
            "model": self.model,
            "messages": [
                # Only user and assistant: a span has no call to answer and no system of its own.
                {"role": "assistant" if m["role"] == "assistant" else "user", **_labelled(m)}
                for m in messages
            ],
            "max_tokens": budget,
            "temperature": 0,
        }
        key = os.environ.get(self.key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}

        def ask() -> Any:
            answer = httpx.post(
                f"{self.base_url}/chat/completions",
                json=body,
                headers=headers,
                timeout=self.timeout,
            )
            answer.raise_for_status()
            return answer.json()

        def again(error: BaseException) -> bool:
            if isinstance(error, httpx.HTTPStatusError):
                code = error.response.status_code
                return code in (408, 409, 429) or code >= 500
            return isinstance(error, httpx.TransportError)

        data = tenacity.Retrying(
            retry=tenacity.retry_if_exception(again),
            stop=tenacity.stop_after_attempt(self.retries),
            wait=tenacity.wait_exponential(multiplier=self.wait, max=30)
            + tenacity.wait_random(0, self.wait),
            reraise=True,
        )(ask)
        try:
            choice = data["choices"][0]
            text = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ValueError("the server's answer has no choices[0].message.content") from None
        if not isinstance(text, str):
            raise ValueError("the server answered without a text (a tool call?)")
        return text, choice.get("finish_reason") == "stop"


def _labelled(message: Plain) -> Plain:
    role = message["role"]
    text = message["content"]
    text = text.encode("utf-8", "replace").decode("utf-8")  # JSON over HTTP has no lone surrogates
    return {"content": f"[tool result]\n{text}" if role == "tool" else text}
