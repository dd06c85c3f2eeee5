import json

import numpy as np
import pytest

from kvevict.agent import edit
from kvevict.agent.examples import login_bug
from kvevict.agent.formats import to_normal
from kvevict.agent.tokens import (
    Anchored,
    CharCounter,
    Charges,
    TokenizerCounter,
    Usage,
    make_counter,
    overhead,
    sizes,
    usage_of,
)
from kvevict.errors import HistoryError


def walk(history, counter, prior=50_000):
    """Predict the size of every call of a session before its usage is known."""
    anchored = Anchored(counter, prior)
    compactions = [e.before for e in history.events if e.kind == "compaction"]
    errors = []
    for i, message in enumerate(history.messages):
        if compactions and compactions[0] <= i:
            compactions.pop(0)
            anchored.reset()
        usage = usage_of(message.usage) if message.role == "assistant" else None
        if usage is None:
            continue
        if anchored.anchor is not None:
            predicted = anchored.predict(history.messages[:i])
            errors.append((predicted - usage.input) / usage.input)
        if message.status not in ("aborted", "error"):
            anchored.observe_at(history.messages, i + 1, usage)
    return np.array(errors), anchored


def test_predicted_context_of_the_real_session_is_within_3_percent_at_p99(pi_session):
    history = to_normal(pi_session, "pi")
    errors, anchored = walk(history, CharCounter())
    p99 = np.quantile(np.abs(errors), 0.99)
    print(
        f"{len(errors)} calls: mean {errors.mean():+.2%}, p99 {p99:.2%}, ratio {anchored.ratio:.3f}"
    )
    assert len(errors) > 450
    assert p99 <= 0.03
    assert abs(errors.mean()) < 0.005


def test_calibration_mends_a_wrong_number_of_characters_a_token(pi_session):
    history = to_normal(pi_session, "pi")
    wrong = np.quantile(np.abs(walk(history, CharCounter(4.0), None)[0]), 0.99)
    errors, anchored = walk(history, CharCounter(4.0))
    assert np.quantile(np.abs(errors), 0.99) < wrong / 2
    assert 1.1 < anchored.ratio < 1.5


def test_whole_session_is_estimated_within_5_percent(pi_session):
    history = to_normal(pi_session, "pi")
    counter, last, true, estimated = CharCounter(), None, 0, 0
    compactions = [e.before for e in history.events if e.kind == "compaction"]
    for i, message in enumerate(history.messages):
        if compactions and compactions[0] <= i:
            compactions.pop(0)
            last = None
        usage = usage_of(message.usage) if message.role == "assistant" else None
        if usage is None or message.status in ("aborted", "error"):
            continue
        if last is not None and usage.input > last[1]:
            true += usage.input - last[1]
            estimated += sum(map(counter.message, history.messages[last[0] : i]))
        last = (i, usage.input)
    assert abs(estimated / true - 1) < 0.05


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {
                "input_tokens": 10,
                "cache_read_input_tokens": 500,
                "cache_creation_input_tokens": 40,
                "output_tokens": 7,
            },
            Usage(10, 500, 40, 7),
        ),
        (
            {
                "prompt_tokens": 550,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 500},
            },
            Usage(50, 500, 0, 7),
        ),
        (
            {
                "input_tokens": 550,
                "output_tokens": 7,
                "input_tokens_details": {"cached_tokens": 500},
            },
            Usage(50, 500, 0, 7),
        ),
        ({"input": 10, "output": 7, "cacheRead": 500, "cacheWrite": 40}, Usage(10, 500, 40, 7)),
        ({"inputTokens": 550, "outputTokens": 7, "cacheReadTokens": 500}, Usage(50, 500, 0, 7)),
        ({"promptTokenCount": 550, "candidatesTokenCount": 7}, Usage(550, 0, 0, 7)),
        (
            {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": None},
            Usage(5, 0, 0, 1),
        ),
    ],
)
def test_providers_own_usage_is_read_as_it_means(usage, expected):
    assert usage_of(usage) == expected


def test_usage_that_counts_nothing_is_ignored_and_nonsense_raises():
    assert usage_of(None) is None
    assert usage_of({"input_tokens": 0, "output_tokens": 0}) is None
    for bad in ({"input_tokens": -1}, {"input_tokens": "7"}, {"x": 1}, {}, [1]):
        with pytest.raises(HistoryError, match="usage"):
            usage_of(bad)


@pytest.mark.parametrize("megabytes", [0, 4])
def test_image_costs_its_charge_wherever_it_stands_and_however_large(megabytes):
    data = "A" * (megabytes << 20)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    call = {"type": "tool_use", "id": "a", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    history = to_normal(
        [
            {"role": "user", "content": [image]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
        "anthropic",
    )
    top, _, nested = sizes(history, CharCounter(charges=Charges(image=1_234)))
    assert top == nested == 1_234


def test_document_text_counts_as_text_and_a_pdf_by_its_charge():
    text = {"type": "document", "source": {"type": "text", "data": "x" * 300}}
    pdf = {"type": "document", "source": {"type": "base64", "data": "x" * 9_000}}
    history = to_normal([{"role": "user", "content": [text]}, {"role": "user", "content": [pdf]}])
    assert sizes(history, CharCounter()).tolist() == [100, 3_000]


def test_edit_makes_the_anchor_stale_until_the_next_usage():
    history = to_normal(login_bug(), "openai-chat")
    anchored = Anchored()
    anchored.observe_at(history.messages, 20, Usage(0, 0, 0, 20_000))
    predicted = anchored.predict(history.messages)
    masked = edit.mask(history, {(4, 0): "[cleared]"})
    freed = int((sizes(history, CharCounter()) - sizes(masked, CharCounter())).sum())
    anchored.edited(history.messages, masked.messages)
    assert anchored.anchor.stale
    assert anchored.predict(masked.messages) == predicted - freed
    anchored.observe_at(masked.messages, 22, Usage(0, 0, 0, 30_000))
    assert not anchored.anchor.stale
    assert anchored.ratio == 1.0  # an edited span is no evidence for calibration


def test_system_prompt_and_tools_count_once_apart_from_the_messages():
    request = {"system": "s" * 300, "tools": [{"name": "t", "input_schema": {}}], "messages": []}
    history = to_normal({**request, "messages": [{"role": "user", "content": "x"}]}, "anthropic")
    tool = len(json.dumps(request["tools"][0], separators=(",", ":")))
    assert overhead(history, CharCounter()) == 100 + -(-tool // 3)


def test_tokenizer_counts_and_never_chokes_on_a_lone_surrogate():
    class Words:
        def encode(self, text):
            text.encode()
            return text.split()

    counter = TokenizerCounter(Words())
    history = to_normal([{"role": "user", "content": "three little \udc00"}], "anthropic")
    assert counter.message(history.messages[0]) == 3 + 4
    assert make_counter(counter) is counter


def test_unknown_counter_raises():
    for bad in ("words", "hf:", object(), True):
        with pytest.raises(ValueError, match="counter"):
            make_counter(bad)
    with pytest.raises(HistoryError, match="no tokenizer"):
        make_counter("hf:/nowhere")
