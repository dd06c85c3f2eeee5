import pytest

from kvevict.agent.acon import DEFAULT_GUIDELINE, Guideline, Guidelines, PairedRun, optimise
from kvevict.agent.manager import HistoryManager
from kvevict.errors import HistoryError, PolicyError


def paired(n, full=True, compressed=False):
    return PairedRun(f"task {n}", f"full {n} port 80{n}", "compressed", full, compressed)


RUNS = [paired(n) for n in range(6)]


class Teacher:
    """An LLM that learns one rule a round."""

    def __init__(self):
        self.prompts = []
        self.rules = 0

    def __call__(self, prompt):
        self.prompts.append(prompt)
        if "GUIDELINE:" in prompt and "FEEDBACK" in prompt:
            self.rules += 1
            return "Keep ports." if self.rules == 1 else f"Keep ports. Rule {self.rules}."
        return "the port is missing"


def knows_ports(text, run):
    return 1.0 if "port" in text else 0.0


def test_better_revision_is_accepted_and_worse_ones_are_kept_but_not_used():
    llm = Teacher()
    done = optimise(Guidelines(), RUNS, llm, knows_ports, rounds=3)
    assert [g.version for g in done.versions] == [0, 1, 2, 3]
    assert [g.accepted for g in done.versions] == [True, True, False, False]
    assert done.best.text == "Keep ports."
    assert (done.best.parent, done.best.score) == (0, 1.0)
    assert done.versions[0].score == 0.0
    assert done.versions[2].parent == 1


def test_lessons_come_from_contrastive_runs_that_are_not_held_out():
    llm = Teacher()
    checked = set()

    def evaluate(text, run):
        checked.add(run.task)
        return 0.0

    runs = [*RUNS, paired(7, True, True), paired(8, False, False)]
    optimise(Guidelines(), runs, llm, evaluate, rounds=1)
    taught = {r.task for r in runs for p in llm.prompts if f"\n{r.task}\n" in p}
    assert taught
    assert not taught & checked
    assert not taught & {"task 7", "task 8"}


def test_nothing_to_learn_asks_nobody():
    llm = Teacher()
    done = optimise(Guidelines(), [paired(1, True, True)] * 4, llm, knows_ports)
    assert done.versions == (Guideline(),)
    assert not llm.prompts


@pytest.mark.parametrize("answer", ["", "   ", "word " * 5_000, DEFAULT_GUIDELINE])
def test_useless_revisions_change_nothing(answer):
    done = optimise(Guidelines(), RUNS, lambda p: answer, lambda t, r: 1.0, rounds=2)
    assert done.best.version == 0


def test_shortening_must_not_lose_score():
    runs = [paired(n, True, n % 2 == 0) for n in range(8)]

    def llm(prompt):
        return "short" if "shorter histories" in prompt else "Keep ports and much else besides."

    done = optimise(Guidelines(), runs, llm, knows_ports, rounds=1, shorten=True)
    assert done.best.text == "Keep ports and much else besides."
    done = optimise(Guidelines(), runs, llm, lambda t, r: 0.5, rounds=0, shorten=True)
    assert done.best.text == "short"


def test_versions_survive_the_disk(tmp_path):
    done = optimise(Guidelines(), RUNS, Teacher(), knows_ports)
    done.save(tmp_path / "g.json")
    assert Guidelines.load(tmp_path / "g.json") == done
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(HistoryError):
        Guidelines.load(tmp_path / "bad.json")


def test_same_seed_same_result():
    assert optimise(Guidelines(), RUNS, Teacher(), knows_ports, seed=3) == optimise(
        Guidelines(), RUNS, Teacher(), knows_ports, seed=3
    )


@pytest.mark.parametrize("bad", [{"rounds": -1}, {"holdout": 0}, {"holdout": 1}, {"batch": 0}])
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="out of range"):
        optimise(Guidelines(), RUNS, Teacher(), knows_ports, **bad)
    with pytest.raises(ValueError, match="at least two"):
        optimise(Guidelines(), RUNS[:1], Teacher(), knows_ports)


def test_policy_takes_the_best_guideline_of_a_file(tmp_path):
    path = tmp_path / "g.json"
    optimise(Guidelines(), RUNS, Teacher(), knows_ports).save(path)
    asked = []

    def summarizer(messages, budget):
        asked.append(messages[-1]["content"])
        return "kept"

    history = [{"role": "user", "content": "go"}]
    for n in range(6):
        history.append(
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": f"c{n}", "name": "read", "input": {}}],
            }
        )
        result = {"type": "tool_result", "tool_use_id": f"c{n}", "content": f"{n} " * 900}
        history.append({"role": "user", "content": [result]})
    manager = HistoryManager(
        f"acon:guideline={path},history=1000,observation=400", summarizer=summarizer
    )
    manager.prepare(history)
    assert asked
    assert all(text.startswith("Keep ports.") for text in asked)
    with pytest.raises(PolicyError, match="no such file"):
        HistoryManager("acon:guideline=missing.json")
