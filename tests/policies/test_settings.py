"""Settings and policy strings: what is understood, and what is refused with value and remedy."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvevict import Policy, PolicyError, parse
from kvevict.policies import H2O, TOVA, Full, Random, SnapKV, StreamingLLM, Window
from kvevict.policy import REGISTRY, share_of

ROOT = Path(__file__).parents[2]

SAME = {
    "full": Full(),
    "window": Window(),
    "window:window=16": Window(16),
    "streaming_llm": StreamingLLM(4, 1020),
    "streaming_llm:sinks=2,window=1_000": StreamingLLM(2, 1000),
    " streaming_llm : sinks = 2 , window = 6 ": StreamingLLM(2, 6),
    "h2o:heavy=512,recent=512": H2O(512, 512),
    "h2o:heavy=20%,recent=10%,sinks=4": H2O("20%", "10%", sinks=4),
    "h2o:normalize=age,decay=0.5": H2O(normalize="age", decay=0.5),
    "random:budget=9,seed=3": Random(9, seed=3),
    "tova:budget=9,scope=layer": TOVA(9, scope="layer"),
    "snapkv:repeat=true,scope=layer": SnapKV(repeat=True, scope="layer"),
}


@pytest.mark.parametrize("text", SAME)
def test_a_string_and_an_object_are_the_same_policy(text: str) -> None:
    assert parse(text) == SAME[text]
    assert parse(str(SAME[text])) == SAME[text]
    assert parse(SAME[text]) is SAME[text]


WRONG_TEXT = {
    "": "known",
    "h2": "h2o",
    "streaming-llm": "streaming_llm",
    "H2O": "known",
    "h2o:budget=3": "heavy",
    "h2o:heavy": "key=value",
    "h2o:heavy=": "key=value",
    "h2o:=3": "key=value",
    "h2o:heavy=1,heavy=2": "twice",
    "h2o:heavy=many": "many",
    "h2o:heavy=1.5": "1.5",
    "h2o:decay=fast": "decay",
    "h2o:normalize=sometimes": "normalize",
    "window:window=10%": "share|int",
    "tova:scope=model": "scope",
    "window:scope=layer": "window",
    "full:window=3": "none",
}


@pytest.mark.parametrize("text", WRONG_TEXT)
def test_a_wrong_string_names_what_is_known(text: str) -> None:
    with pytest.raises(PolicyError, match=WRONG_TEXT[text]):
        parse(text)


def test_an_unknown_name_lists_all_names() -> None:
    with pytest.raises(PolicyError) as caught:
        parse("h2o2")
    for name in ("full", "window", "streaming_llm", "h2o", "random"):
        assert name in str(caught.value)
    for wrong in (None, 3, {"name": "h2o"}):
        with pytest.raises(PolicyError, match="string"):
            parse(wrong)  # type: ignore[arg-type]


WRONG: list[tuple[type[Policy], dict[str, Any], str]] = [
    (StreamingLLM, {"sinks": -1}, "-1"),
    (StreamingLLM, {"window": 0}, "at least 1"),
    (StreamingLLM, {"window": "20%"}, "number of tokens"),
    (StreamingLLM, {"window": 3.0}, "whole number"),
    (StreamingLLM, {"window": True}, "whole number"),
    (StreamingLLM, {"window": None}, "whole number"),
    (Window, {"window": 0}, "at least 1"),
    (Window, {"window": -5}, "-5"),
    (H2O, {"heavy": 0, "recent": 0}, "above 0"),
    (H2O, {"heavy": -1}, "-1"),
    (H2O, {"heavy": "120%"}, "100%"),
    (H2O, {"heavy": "-1%"}, "0%"),
    (H2O, {"heavy": "%"}, "0%"),
    (H2O, {"heavy": "nan%"}, "0%"),
    (H2O, {"heavy": "60%", "recent": "50%"}, "more than 100%"),
    (H2O, {"heavy": "20"}, "whole number"),
    (H2O, {"sinks": "5%"}, "number of tokens"),
    (H2O, {"normalize": "mean"}, "age"),
    (H2O, {"decay": 0.0}, "decay"),
    (H2O, {"decay": 1.5}, "decay"),
    (H2O, {"decay": float("nan")}, "decay"),
    (H2O, {"decay": True}, "decay"),
    (H2O, {"scope": "model"}, "layer"),
    (TOVA, {"scope": None}, "layer"),
    (TOVA, {"budget": 3, "sinks": 3}, "fewer"),
    (SnapKV, {"scope": True}, "layer"),
    (SnapKV, {"kernel": 4}, "odd"),
    (SnapKV, {"repeat": 1}, "True or False"),
    (Random, {"budget": 0}, "at least 1"),
    (Random, {"budget": 3, "sinks": 2, "recent": 2}, "larger"),
    (Random, {"seed": -1}, "-1"),
]


@pytest.mark.parametrize(("kind", "given", "named"), WRONG, ids=str)
def test_bad_settings_name_the_value_and_the_remedy(
    kind: type[Policy], given: dict[str, Any], named: str
) -> None:
    with pytest.raises(PolicyError, match=named) as caught:
        kind(**given)
    assert isinstance(caught.value, ValueError)
    assert kind.__name__ in str(caught.value)


def test_shares_are_rounded_down_of_a_known_prompt() -> None:
    policy = H2O("20%", "10%", sinks=4)
    assert policy.has_shares
    assert policy.resolve(101) == H2O(20, 10, sinks=4)
    assert policy.resolve(101).capacity == 34
    assert H2O(3, 4).resolve(7) == H2O(3, 4)
    assert share_of("12.5%", 16) == 2
    assert share_of(" 100% ", 7) == 7
    assert share_of("29%", 100) == 29  # 0.29 * 100 is 28.999999999999996
    for length in range(1, 500):
        assert share_of("50%", length) == length // 2
    with pytest.raises(PolicyError, match="resolve"):
        _ = policy.capacity


def test_departures_from_the_paper_are_named() -> None:
    assert H2O().departures() == StreamingLLM().departures() == {}
    assert H2O(sinks=4, decay=0.9).departures() == {"sinks": 4, "decay": 0.9}
    assert H2O(normalize="age").departures() == {"normalize": "age"}
    assert H2O(scope="layer").departures() == {"scope": "layer"}
    assert TOVA().departures() == {"scope": "head"}  # the paper has one set per layer
    assert TOVA(scope="layer").departures() == SnapKV().departures() == {}
    assert TOVA(sinks=2, scope="layer").departures() == {"sinks": 2}
    assert SnapKV(repeat=True, scope="layer").departures() == {"repeat": True, "scope": "layer"}


def test_every_policy_says_where_it_comes_from() -> None:
    for name, kind in REGISTRY.items():
        assert kind.name == name
        assert (kind.__doc__ or "").strip()
        assert dataclasses.is_dataclass(kind)
    for kind in (StreamingLLM, H2O, Window):
        assert "arXiv" in (kind.__doc__ or "")


def test_a_name_can_be_taken_once() -> None:
    with pytest.raises(PolicyError, match="taken"):

        class Other(Policy, name="h2o"):
            pass

    assert REGISTRY["h2o"] is H2O


def test_a_new_policy_is_one_file(tmp_path: Path) -> None:
    # A new file beside the others registers itself: no list is edited.
    package = tmp_path / "kvevict"
    package.mkdir()
    for name in ("__init__.py", "policy.py", "slots.py", "errors.py"):
        (package / name).write_bytes((ROOT / "kvevict" / name).read_bytes())
    folder = package / "policies"
    folder.mkdir()
    for path in (ROOT / "kvevict" / "policies").glob("*.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "first.py").write_text(
        "from dataclasses import dataclass\n"
        "from kvevict.policy import Policy\n"
        "@dataclass(frozen=True)\n"
        "class First(Policy, name='first'):\n"
        "    budget: int = 3\n"
        "    @property\n"
        "    def extents(self):\n"
        "        return self.budget, 0, 0\n"
    )
    code = (
        "import kvevict, numpy as np\n"
        "policy = kvevict.parse('first:budget=2')\n"
        "keep = policy.keep(kvevict.Slots(np.array([5, 1, 3])))\n"
        "assert keep.tolist() == [False, True, True], keep\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
