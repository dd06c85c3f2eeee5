"""The comparison: rows at equal budget, exact where exactness is known, resumable, determined."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

from kvevict import console, patch
from kvevict.agent.formats import to_normal
from kvevict.agent.prices import get_prices
from kvevict.errors import HistoryError, KvevictError
from kvevict.eval import choices, compare
from kvevict.eval.compare_cli import app
from kvevict.eval.compare_page import load_view, unpack
from kvevict.eval.compare_turn import Protocol, TurnBench
from kvevict.eval.planted import DEPTHS, plant
from kvevict.eval.results import RunFolder, load_result
from kvevict.eval.token_choices import TOKEN_POLICIES
from kvevict.models.realise import common_prefix
from kvevict.models.spans import render

CHATML = (
    "{% for message in messages %}"
    "{{'<' + message['role'] + '>' + message['content'] + '</>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PROTOCOL = Protocol(budgets=(0.75, 0.4), target=24, chunk=64)
PRICES = get_prices("sonnet")


def messages(turns: int = 6) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix clocks."},
        {"role": "user", "content": "The clock of the harbor stands still. Fix it."},
    ]
    for turn in range(turns):
        call = {"name": "look", "arguments": {"at": f"wheel {turn}"}}
        found.append(
            {
                "role": "assistant",
                "content": f"I look at wheel {turn}.",
                "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}],
            }
        )
        text = f"wheel {turn} has {turn + 7} teeth. " * (1 + turn % 3)
        found.append({"role": "tool", "tool_call_id": f"c{turn}", "content": text})
    return [*found, {"role": "assistant", "content": "Wheel 3 was bent; it ticks now."}]


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> Any:
    """The byte tokenizer with a chat template."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = CHATML
    return made


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def bench(model: Any, chat: Any) -> Any:
    turn = len(messages()) - 1
    planted, facts = plant(messages(), turn, (0.1, 0.9))
    with patch(model):
        yield TurnBench(model, chat, planted, (turn, turn + 1), facts, PROTOCOL, [200])


@pytest.fixture(scope="module")
def found(bench: TurnBench) -> Any:
    return bench.run()


def test_every_row_is_there_once(found: Any) -> None:
    keys = [(r["policy"], r["level"], r["realisation"], r["budget"]) for r in found.rows]
    assert len(set(keys)) == len(keys)
    wanted = [("full", "none", "none", None)]
    for share in PROTOCOL.budgets:
        wanted += [(p, "token", h, share) for p in TOKEN_POLICIES for h in ("kv", "kv_reindex")]
        named = [*choices.SLOTS, *choices.FAMILIES, "roots_only"]
        wanted += [(p, "message", h, share) for p in named for h in PROTOCOL.realisations]
    assert sorted(map(str, keys)) == sorted(map(str, wanted))


def test_nothing_exceeds_its_budget_unseen(found: Any) -> None:
    for row in found.rows[1:]:
        if row["fits"]:
            assert row["kept_tokens"] <= row["budget_tokens"], row["policy"]
        else:
            assert row["policy"] in choices.FAMILIES  # masking cannot reach every budget
    token = [r for r in found.rows if r["level"] == "token"]
    assert all(r["kept_tokens"] == r["budget_tokens"] for r in token)


def test_tokens_bound_the_mass_of_messages(found: Any) -> None:
    """P3 on the model's own attention."""
    rows = [r for r in found.rows if r["level"] == "message"]
    assert rows
    for row in rows:
        assert row["mass_kept"] <= row["mass_bound"] + 1e-6, row["policy"]
    assert any(r["mass_bound"] - r["mass_kept"] > 1e-3 for r in rows)


def test_recomputed_is_the_formula_s(bench: TurnBench, found: Any) -> None:
    """P5: `text` computes total - longest common prefix; `kv` only what is new text."""
    rows = {(r["policy"], r["realisation"], r["budget"]): r for r in found.rows}
    for share in PROTOCOL.budgets:
        choice = choices.by_slots("message_recent", bench.what, bench.what.budget(share))
        after = bench.render(choice.history).ids
        lost = len(after) - common_prefix(bench.context.ids, after)
        row = rows["message_recent", "text", share]
        assert row["recomputed_tokens"] == lost > 0
        assert row["kept_tokens"] == len(after)
        assert rows["message_recent", "kv", share]["recomputed_tokens"] == 0
        assert (
            0
            < rows["mask_last_m", "kv", share]["recomputed_tokens"]
            < (rows["mask_last_m", "text", share]["recomputed_tokens"])
        )


def test_full_is_the_bare_model(bench: TurnBench, found: Any, model: Any) -> None:
    ids = torch.tensor([[*bench.context.ids, *bench.target]])
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    begin = len(bench.context.ids) + bench.scored
    goal = torch.tensor(bench.target[bench.scored :])
    nll = torch.nn.functional.cross_entropy(logits[begin - 1 : -1], goal, reduction="sum")
    full = found.rows[0]
    assert full["nll_sum"] == pytest.approx(float(nll), abs=1e-3)
    assert (full["kl_sum"], full["top1_sum"]) == (0.0, full["tokens_scored"])


def test_text_is_a_fresh_prompt(bench: TurnBench, found: Any, model: Any) -> None:
    choice = choices.by_slots("message_recent", bench.what, bench.what.budget(0.4))
    after = bench.render(choice.history).ids
    with torch.no_grad():
        logits = model(torch.tensor([[*after, *bench.target]])).logits[0].float()
    begin = len(after) + bench.scored
    goal = torch.tensor(bench.target[bench.scored :])
    nll = torch.nn.functional.cross_entropy(logits[begin - 1 : -1], goal, reduction="sum")
    row = next(
        r
        for r in found.rows
        if (r["policy"], r["realisation"], r["budget"]) == ("message_recent", "text", 0.4)
    )
    assert row["nll_sum"] == pytest.approx(float(nll), abs=1e-3)


def test_the_oracle_is_the_loss_without_each_group(bench: TurnBench, found: Any) -> None:
    oracle = found.facts["oracle"]
    group = next(g for g in bench.history.groups if g.start == 4)
    places = list(range(group.start, group.stop))
    left = copy.deepcopy(bench.full)
    left.drop(places)
    delta = bench.score(left, asking=False)["nll_sum"] - found.rows[0]["nll_sum"]
    assert oracle[4] == pytest.approx(delta, abs=1e-6)
    assert oracle[0] == oracle[1] == 0.0  # roots
    assert -1 <= found.facts["correlation"]["sum"] <= 1


def test_facts_stand_where_they_say_and_are_asked_for(bench: TurnBench, chat: Any) -> None:
    carriers = {q[0].carrier for q in bench.questions}
    assert carriers == {"system", "user", "tool result", "tool arguments"}
    for fact, ids, code in bench.questions:
        span = bench.context.spans[fact.message]
        assert fact.sentence in chat.decode(bench.context.ids[span.start : span.stop])
        assert chat.decode(ids[-code:]) == fact.code
        assert fact.question in chat.decode(ids)
    assert len({f.code for f, *_ in bench.questions}) == len(bench.questions)


def test_planting_changes_no_message_that_carries_none() -> None:
    plain = messages()
    planted, facts = plant(plain, len(plain) - 1, DEPTHS)
    touched = {f.message for f in facts}
    assert len(touched) == len(facts) >= 8
    assert [m for i, m in enumerate(planted) if i not in touched] == [
        m for i, m in enumerate(plain) if i not in touched
    ]
    assert plain == messages()  # not changed in place


def test_mass_is_that_of_the_messages_kept_among_equal_ones(model: Any, chat: Any) -> None:
    """Results that say the same: the mass is that of the one that stayed."""
    alike = messages()[:2]
    for turn in range(6):
        call = {"name": "look", "arguments": {"at": "wheel " + "ab"[turn % 2]}}
        made = {"id": f"c{turn}", "type": "function", "function": call}
        alike.append({"role": "assistant", "content": "I look.", "tool_calls": [made]})
        alike.append({"role": "tool", "tool_call_id": f"c{turn}", "content": "no output"})
    alike.append({"role": "assistant", "content": "It ticks."})
    turn = len(alike) - 1
    with patch(model):
        bench = TurnBench(
            model, chat, alike, (turn, turn + 1), [], Protocol((0.5,), ("kv",), target=8)
        )
        rows = [r for r in bench.run().rows if r["level"] == "message"]
    for row in rows:
        kept = np.zeros(len(bench.mass), dtype=bool)
        for span, state in zip(bench.context.spans, row["states"], strict=True):
            kept[span.start : span.stop] = state == "kept"
        assert row["mass_kept"] == pytest.approx(bench.mass[kept].sum() / bench.mass.sum())


def test_the_window_s_votes_do_not_depend_on_the_steps_shown(
    bench: TurnBench, model: Any, chat: Any
) -> None:
    turn = len(messages()) - 1
    with patch(model):
        near = TurnBench(
            *(model, chat, messages(), (turn, turn + 1), [], PROTOCOL),
            [len(render(messages()[:turn], chat).ids) - 5],
        )
        none = TurnBench(model, chat, messages(), (turn, turn + 1), [], PROTOCOL)
    for a, b in zip(near.prefills[-1].window, none.prefills[-1].window, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<' + m.role + '>' + m.content + '</>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def test_roles_that_must_alternate(model: Any, chat: Any) -> None:
    """Gone groups and questions leave two users in a row, which the template refuses."""
    made = copy.deepcopy(chat)
    made.chat_template = ALTERNATING
    talk: list[dict[str, Any]] = []
    for turn in range(5):
        talk.append({"role": "user", "content": f"How many teeth has wheel {turn}?"})
        talk.append({"role": "assistant", "content": f"It has {turn + 7} teeth."})
    planted, facts = plant(talk, 9, (0.5,))
    with patch(model):
        bench = TurnBench(
            *(model, made, planted, (9, 10), facts, Protocol((0.5,), ("text", "kv"), target=8))
        )
        rows = bench.run().rows
    assert len({r["policy"] for r in rows}) > len(choices.FAMILIES)
    assert len(bench.questions) == len(facts) > 0
    for fact, ids, code in bench.questions:
        text = made.decode([*bench.context.ids, *ids])
        assert text.endswith(f"<user>{fact.question}</><assistant>{fact.opening}{fact.code}")
        assert made.decode(ids[-code:]) == fact.code


def test_turns_that_say_nothing_are_not_scored(chat: Any) -> None:
    empty = [*messages()[:-1], {"role": "assistant", "content": ""}]
    assert compare.plan(to_normal(empty, "hf"), chat, turns=50).turns[-1] == len(empty) - 3


QUICK = Protocol((0.5,), ("text", "kv"), target=16, chunk=64)


def run_in(folder: Path | None, model: Any, chat: Any, **more: Any) -> list[Any]:
    made = RunFolder(folder, "compare", {"seed": 0}) if folder else None
    history = to_normal(messages(), "hf")
    given = {"protocol": QUICK, "turns": 3, "prices": PRICES, "folder": made, **more}
    return compare.run(model, chat, history, **given)


def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    model: Any, chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_in(tmp_path / "whole", model, chat)
    made = TurnBench.run
    done = []

    def dies(self: TurnBench) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(self)
        return made(self)

    monkeypatch.setattr(TurnBench, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path / "cut", model, chat)
    monkeypatch.setattr(TurnBench, "run", made)
    again = run_in(tmp_path / "cut", model, chat)
    assert json.dumps([o.row for o in again]) == json.dumps([o.row for o in whole])
    for name in ("whole", "cut"):
        assert load_view(tmp_path / name) is not None
    views = [(tmp_path / n / "view.json").read_bytes() for n in ("whole", "cut")]
    assert views[0] == views[1]


def test_the_view_shows_what_the_rows_kept(model: Any, chat: Any, tmp_path: Path) -> None:
    outcomes = run_in(tmp_path, model, chat)
    view = load_view(tmp_path)
    assert view is not None
    rows = {(o.row["policy"], o.row.get("budget")): o.row for o in outcomes}
    steps = [s["tokens"] for s in view["steps"]]
    assert steps == sorted(steps)
    assert steps[-1] == len(view["tokens"])
    for row in view["token_rows"]:
        maps = unpack(row["maps"], view["layers"], view["heads"], steps)
        assert (maps[-1].sum(-1) == row["budget_tokens"]).all()
        assert (maps[0].sum(-1) == min(steps[0], row["budget_tokens"])).all()
        assert (row["policy"], row["budget"]) in rows
    for row in view["message_rows"]:
        assert [len(s) for s in row["states"]] == [s["messages"] for s in view["steps"]]
    recent = next(r for r in view["message_rows"] if r["policy"] == "message_recent")
    assert "hidden" in recent["states"][-1]
    masked = next(r for r in view["message_rows"] if r["policy"] == "mask_last_m")
    assert "masked" in masked["states"][-1]


def test_rows_over_turns_are_paired(model: Any, chat: Any) -> None:
    outcomes = run_in(None, model, chat)
    rows = [o.row for o in outcomes if o.row["kind"] == "comparison"]
    full = rows[0]
    assert full["policy"] == "full"
    assert (full["nll_delta"], full["kl"], full["top1_agreement"]) == (0.0, 0.0, 1.0)
    for row in rows:
        assert row["turns"] == 3
        assert row["tokens_scored"] == full["tokens_scored"]
        assert row["nll_delta"] == pytest.approx(row["nll"] - full["nll"], abs=1e-9)
        assert row["nll_delta_low"] <= row["nll_delta_high"]
    text = next(r for r in rows if (r["policy"], r["realisation"]) == ("message_recent", "text"))
    kv = next(r for r in rows if (r["policy"], r["realisation"]) == ("message_recent", "kv"))
    assert text["prompt_cost"] > kv["prompt_cost"]
    turns = [o.row for o in outcomes if o.row["kind"] == "turn"]
    assert [t["facts_planted"] for t in turns][:-1] == [0, 0]
    assert turns[-1]["facts_planted"] > 0


def test_turns_are_spread_and_short_trajectories_refused(chat: Any) -> None:
    history = to_normal(messages(9), "hf")
    chosen = compare.plan(history, chat, turns=3)
    assert len(chosen.turns) == 3
    assert chosen.turns[-1] == len(messages(9)) - 1
    tight = compare.plan(history, chat, turns=50, max_context=900)
    assert all(len(render(messages(9)[:t], chat).ids) <= 900 for t in tight.turns)
    assert tight.left_out > 0
    with pytest.raises(HistoryError, match="longer trajectory"):
        compare.plan(to_normal(messages(1), "hf"), chat)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, chat: Any) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_folder, folder)
    chat.save_pretrained(folder)
    return folder


@pytest.fixture
def trajectory(tmp_path: Path) -> Path:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(messages()))
    return path


def call(*words: Any) -> int:
    with pytest.raises(SystemExit) as caught:
        console.run(lambda: app([str(w) for w in words]))
    return int(caught.value.code or 0)


def test_the_command_writes_a_folder_and_prints_one_object(
    chat_folder: Path,
    trajectory: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "run"
    words = (trajectory, chat_folder, "--turns", 2, "--budgets", ".5", "--target", 16)
    words = (*words, "--realisations", "kv,text", "--out", out)
    assert call(*words, "--json") == console.DONE
    printed = json.loads(capsys.readouterr().out)
    assert printed["command"] == "compare"
    assert {r["realisation"] for r in printed["rows"] if "realisation" in r} == {
        *("none", "kv", "kv_reindex", "text")
    }
    kept = load_result(out / "result.json")
    assert len(kept["rows"]) == len(printed["rows"])
    assert call(*words) == console.BAD_INPUT  # holds this run already
    assert "--resume" in capsys.readouterr().err
    assert call(*words, "--resume") == console.DONE
    assert "message_sum" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budgets", "1.5"], "between 0 and 1"),
        (["--budgets", "x"], "no list of shares"),
        (["--budgets", ""], "between 0 and 1"),
        (["--realisations", "magic"], "text, kv, kv_reindex"),
        (["--realisations", ","], "is empty"),
        (["--max-context", "20"], "longer trajectory"),
        (["--max-context", "many"], "no number of tokens"),
        (["--prices", "gold"], "gold"),
        (["--resume"], "--out"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: list[str], said: str, chat_folder: Path, trajectory: Path, capsys: Any
) -> None:
    assert call(trajectory, chat_folder, *words) == console.BAD_INPUT
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert "Traceback" not in error


def test_files_that_are_no_trajectory_are_refused(
    chat_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", '{"x": 1}')):
        (tmp_path / name).write_text(text)
        assert call(tmp_path / name, chat_folder) == console.BAD_INPUT
    assert call(tmp_path / "none.json", chat_folder) == console.BAD_INPUT
    assert "Traceback" not in capsys.readouterr().err


def test_a_tokenizer_without_template_is_refused(model_folder: Path, trajectory: Path) -> None:
    assert call(trajectory, model_folder) == console.BAD_INPUT


def test_models_with_other_layers_are_refused(tmp_path: Path, chat: Any) -> None:
    config = Gemma3TextConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = Gemma3ForCausalLM(config).eval()
    with pytest.raises(KvevictError, match="full attention"):
        run_in(None, model, chat)
