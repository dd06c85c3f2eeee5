"""A running chat whose history a policy edits: what it computes again, and what it may hold."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvevict import patch
from kvevict.agent.formats import to_normal
from kvevict.errors import BudgetError, HistoryError, NotPatchedError, PolicyError
from kvevict.models.realise import common_prefix
from kvevict.models.session import AgentSession
from kvevict.models.small import load

WINDOW, OUTPUT = 420, 12


@pytest.fixture(scope="module")
def bytes_model(chat_tokenizer: Any) -> Any:
    """A random Llama with the byte tokenizer's vocabulary."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(chat_tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def letters(tokenizer: Any) -> Callable[[torch.Tensor], int]:
    """Return a choice among letters: a byte of a broken character would not come back as it was."""
    allowed = torch.tensor([tokenizer.encode(c)[0] for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"])
    return lambda logits: int(allowed[logits[allowed].argmax()])


def talk(session: AgentSession, turns: int = 10, choose: Any = None) -> None:
    session.append({"role": "system", "content": "You answer."})
    for turn in range(turns):
        session.append({"role": "user", "content": f"Question {turn}: what is {turn} and {turn}?"})
        answer = session.generate(choose=choose)
        assert answer["role"] == "assistant"
        assert session.messages[-1] == answer


def check_bounded(session: AgentSession) -> None:
    for report in session.reports:
        assert report.context + report.generated <= WINDOW
    assert session.cache.stored <= WINDOW
    held = sum(x.nbytes for layer in session.cache.layers for x in (layer.keys, layer.values))
    assert session.cache.nbytes() == held


@pytest.mark.parametrize("policy", ["window:window=250", "streaming_llm:window=250", "h2o"])
@pytest.mark.parametrize("how", ["kv", "kv_reindex"])
def test_ten_turns_by_kv_compute_nothing_again(
    bytes_model: Any, chat_tokenizer: Any, policy: str, how: str
) -> None:
    with patch(bytes_model):
        session = AgentSession(
            bytes_model,
            chat_tokenizer,
            policy,
            window=WINDOW,
            max_output=OUTPUT,
            realisation=how,
            score="attention" if policy == "h2o" else "rules",
        )
        talk(session, choose=letters(chat_tokenizer))
    assert [r.recomputed for r in session.reports] == [0] * 10
    assert sum(r.evicted for r in session.reports) > 100  # the policy did act
    check_bounded(session)
    assert session.cache.contiguous == (how == "kv_reindex")


def test_text_computes_again_what_the_formula_says(bytes_model: Any, chat_tokenizer: Any) -> None:
    """P5: total - longest common prefix, less what is new."""
    with patch(bytes_model):
        session = AgentSession(
            bytes_model,
            chat_tokenizer,
            "window:window=250",
            window=WINDOW,
            max_output=OUTPUT,
            realisation="text",
        )
        session.append({"role": "system", "content": "You answer."})
        said = 0
        for turn in range(10):
            session.append({"role": "user", "content": f"Question {turn}: what is it?"})
            before = session.cache.ids
            session.generate(choose=letters(chat_tokenizer))
            report = session.reports[-1]
            after = session.cache.ids[: report.context]
            lost = report.context - common_prefix(before, after) - report.new
            assert report.recomputed == lost
            said += report.recomputed
    assert said > 300
    check_bounded(session)


def test_a_turn_by_text_is_a_fresh_prompt(bytes_model: Any, chat_tokenizer: Any) -> None:
    """What `text` answers after evictions is what the bare model answers to the edited history."""
    with patch(bytes_model):
        session = AgentSession(
            bytes_model,
            chat_tokenizer,
            "window:window=250",
            window=WINDOW,
            max_output=OUTPUT,
            realisation="text",
        )
        talk(session, 9, letters(chat_tokenizer))
        session.append({"role": "user", "content": "And now?"})
        answer = session.generate(choose=letters(chat_tokenizer))
        context = session.cache.ids[: session.reports[-1].context]
    assert session.reports[-1].recomputed > 0
    choose, ids = letters(chat_tokenizer), list(context)
    with torch.no_grad():
        for _ in range(OUTPUT):
            ids.append(choose(bytes_model(torch.tensor([ids])).logits[0, -1]))
    assert chat_tokenizer.decode(ids[len(context) :]) == answer["content"]


def looking(turn: int) -> Callable[[str], dict[str, Any]]:
    """Return a parser that finds a call in every answer."""
    call = {"name": "look", "arguments": {"turn": turn}}
    made = {"id": f"look-{turn}", "type": "function", "function": call}
    return lambda text: {"role": "assistant", "content": text, "tool_calls": [made]}


def test_masked_results_are_the_only_thing_that_kv_computes(
    bytes_model: Any, chat_tokenizer: Any
) -> None:
    policy = "complexity_trap_mask:m=1"
    found = {}
    with patch(bytes_model):
        for how in ("kv", "text"):
            session = AgentSession(
                bytes_model,
                chat_tokenizer,
                policy,
                window=1200,
                max_output=OUTPUT,
                realisation=how,
            )
            session.append({"role": "user", "content": "Look around."})
            for turn in range(4):
                said = session.generate(choose=letters(chat_tokenizer), parse=looking(turn))
                assert said["tool_calls"]
                seen = {"role": "tool", "tool_call_id": f"look-{turn}", "content": "x" * 150}
                session.append(seen)
            session.generate(choose=letters(chat_tokenizer))
            found[how] = session
    kv, text = (sum(r.recomputed for r in found[h].reports) for h in ("kv", "text"))
    assert found["kv"].cache.stored == found["text"].cache.stored
    assert 0 < kv < text / 2  # the placeholders alone


def test_attention_scores_choose_what_the_model_looked_at(
    bytes_model: Any, chat_tokenizer: Any
) -> None:
    with patch(bytes_model):
        session = AgentSession(
            bytes_model,
            chat_tokenizer,
            "h2o",
            window=WINDOW,
            max_output=OUTPUT,
            score="attention",
        )
        talk(session, 3, letters(chat_tokenizer))
        session._learn()
    assert len(session._attention) >= 5
    assert max(session._attention.values()) > 0


def test_a_judge_may_score(bytes_model: Any, chat_tokenizer: Any) -> None:
    """A callable stands for a model that judges: it keeps the message that it likes."""
    liked = "Question 1"

    def judge(history: Any) -> list[float]:
        return [float(any(liked in b.text for b in m.blocks)) for m in history.messages]

    with patch(bytes_model):
        session = AgentSession(
            bytes_model, chat_tokenizer, "h2o:heavy=280,recent=40", window=WINDOW,
            max_output=OUTPUT, score=judge,
        )  # fmt: skip
        talk(session, 9, letters(chat_tokenizer))
    texts = [m["content"] for m in session._view]
    assert any(liked in t for t in texts)
    assert not any("Question 3" in t for t in texts)


@pytest.mark.parametrize("same", [False, True])
def test_gaps_close_before_positions_leave_the_trained_range(
    chat_tokenizer: Any, same: bool
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(chat_tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=600,
    )
    model = LlamaForCausalLM(config).eval()
    highest = []

    def watched(logits: torch.Tensor) -> int:
        highest.append(session.cache.next_position)
        letter = "ABCDEFGHIJKLMNOP"[len(session.reports)]
        return int(chat_tokenizer.encode(letter)[0])

    with patch(model):
        session = AgentSession(
            model, chat_tokenizer, "window:window=250", window=WINDOW, max_output=OUTPUT
        )
        for turn in range(16):  # equal messages: one leaves and another comes in the same turn
            text = "Go on with it, please. " * 3 if same else f"Question {turn}: what is {turn}?"
            session.append({"role": "user", "content": text})
            session.generate(choose=watched)
    assert max(highest) <= 600
    assert sum(r.turned for r in session.reports) > 0
    assert sum(r.recomputed for r in session.reports) == 0


def test_bad_use_is_refused_and_changes_nothing(bytes_model: Any, chat_tokenizer: Any) -> None:
    with pytest.raises(NotPatchedError, match="patch"):
        AgentSession(bytes_model, chat_tokenizer)
    with patch(bytes_model):
        wrongs = ({"realisation": "magic"}, {"score": "guess"}, {"max_output": 4096})
        for wrong in (*wrongs, {"aggregate": "median"}, {"chunk": 0}):
            with pytest.raises(PolicyError, match=next(iter(wrong))):
                AgentSession(bytes_model, chat_tokenizer, **wrong)
        reach = bytes_model.config.max_position_embeddings
        with pytest.raises(PolicyError, match=f"the model has {reach} positions"):
            AgentSession(bytes_model, chat_tokenizer, window=reach + 1)
        session = AgentSession(bytes_model, chat_tokenizer, "full", window=120, max_output=20)
        with pytest.raises(HistoryError, match="nothing to answer"):
            session.generate()
        with pytest.raises(HistoryError):
            session.append([{"role": "user", "content": "fine"}, {"role": "nobody"}])
        assert session.messages == []
        session.append({"role": "user", "content": "y" * 300})
        for most in (0, -3):
            with pytest.raises(ValueError, match="max_new_tokens"):
                session.generate(most)
        with pytest.raises(BudgetError, match="window"):
            session.generate()
        assert session.cache.stored == 0
        assert len(session.messages) == 1


@pytest.mark.parametrize("how", ["text", "kv", "kv_reindex"])
@pytest.mark.parametrize("place", [1, 4])
def test_a_turn_that_failed_is_answered_by_the_next(
    bytes_model: Any, chat_tokenizer: Any, how: str, place: int
) -> None:
    """`choose` fails at the first token or later; nothing of it stays, and no gap is left."""
    choose, calls = letters(chat_tokenizer), []

    def fails(logits: torch.Tensor) -> int:
        calls.append(1)
        if len(calls) == place:
            raise ValueError("no choice")
        return choose(logits)

    with patch(bytes_model):
        pair = [
            AgentSession(
                bytes_model, chat_tokenizer, window=WINDOW, max_output=OUTPUT, realisation=how
            )
            for _ in range(2)
        ]
        for session in pair:
            session.append({"role": "user", "content": "Well?"})
        with pytest.raises(ValueError, match="no choice"):
            pair[0].generate(choose=fails)
        answers = [s.generate(choose=choose) for s in pair]
    assert answers[0] == answers[1]
    assert pair[0].cache.ids == pair[1].cache.ids
    assert pair[0].cache.contiguous
    assert [len(s.reports) for s in pair] == [1, 1]


@pytest.mark.parametrize("wrong", [None, {"role": "user", "content": "?"}, {"content": "A"}])
def test_a_parse_that_gives_no_answer_changes_nothing(
    bytes_model: Any, chat_tokenizer: Any, wrong: Any
) -> None:
    with patch(bytes_model):
        session = AgentSession(bytes_model, chat_tokenizer, window=WINDOW, max_output=OUTPUT)
        session.append({"role": "user", "content": "Well?"})
        with pytest.raises(HistoryError, match="role assistant"):
            session.generate(choose=letters(chat_tokenizer), parse=lambda text: wrong)
        assert (len(session.messages), session.reports) == (1, [])
        session.generate(choose=letters(chat_tokenizer))
    assert len(session.messages) == 2


def test_contents_in_parts_are_known_by_size_and_attention(
    bytes_model: Any, chat_tokenizer: Any
) -> None:
    with patch(bytes_model):
        session = AgentSession(
            bytes_model, chat_tokenizer, "h2o", window=WINDOW, max_output=OUTPUT, score="attention"
        )
        given = {"role": "user", "content": [{"type": "text", "text": x} for x in ("One", "Two")]}
        session.append(given)
        given["content"].clear()  # the caller's own copy
        session.generate(choose=letters(chat_tokenizer))
        session.append({"role": "user", "content": "Go on."})
        session._learn()
        history = to_normal(session.messages, "hf")
    assert len(history.messages[0].blocks) == 2
    sizes = [s.size for s in session._render(session.messages).spans]
    assert [session._counter.message(m) for m in history.messages] == sizes
    scores = session._by_attention(history)
    assert scores[2] > max(scores[:2]) > 0  # what was not read yet comes first


def test_an_answer_without_an_opening_is_a_piece_of_its_own(
    bytes_model: Any, chat_tokenizer: Any
) -> None:
    """A template without a generation prompt: the answer does not grow the user's message."""
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[' + m.content + ']' }}"
        "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
    )
    choose, calls = letters(tokenizer), []

    def spaced(logits: torch.Tensor) -> int:
        calls.append(1)
        return tokenizer.encode(" ")[0] if len(calls) % OUTPUT == 1 else choose(logits)

    with patch(bytes_model):
        session = AgentSession(bytes_model, tokenizer, window=WINDOW, max_output=OUTPUT)
        for turn in range(3):
            session.append({"role": "user", "content": f"Question {turn}"})
            session.generate(choose=spaced)
    assert [r.recomputed for r in session.reports] == [0, 0, 0]
    assert [r.evicted for r in session.reports] == [0, 0, 0]


@pytest.mark.slow
def test_ten_turns_of_the_real_model() -> None:
    model, tokenizer = load("smollm2-135m")
    with patch(model):
        found = {}
        for how in ("kv", "text"):
            session = AgentSession(
                model,
                tokenizer,
                "window:window=300",
                window=500,
                max_output=24,
                realisation=how,
            )
            session.append({"role": "system", "content": "You are a helpful assistant."})
            for turn in range(10):
                session.append({"role": "user", "content": f"Tell me a fact about number {turn}."})
                session.generate()
            found[how] = session
    kv, text = found["kv"].reports, found["text"].reports
    assert [r.recomputed for r in kv] == [0] * 10
    assert sum(r.recomputed for r in text) > 500
    assert all(r.context + r.generated <= 500 for r in kv + text)
