import base64
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvevict.errors import KvevictError
from kvevict.eval import report
from kvevict.eval.compare_page import embedded, load_view, pack, script_source, unpack
from kvevict.eval.compare_script import SCRIPT
from kvevict.eval.compare_style import STYLE
from kvevict.eval.figures import figures
from kvevict.eval.results import write_json

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028<!--"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium to open the page in")


def make_view(tokens: int = 48, layers: int = 2, heads: int = 3) -> dict[str, Any]:
    """Return a view of 6 messages of one size in 3 steps, a policy for each level and budget."""
    rng = np.random.default_rng(5)
    size, lengths = tokens // 6, [tokens // 3, 2 * tokens // 3, tokens]
    roles = ["system", "user", "assistant", "tool", "assistant", "tool"]
    messages = [
        {"role": r, "kind": "text", "text": f"message {i}\n\nof {r}", "tokens": size}
        for i, r in enumerate(roles)
    ]
    token_rows, message_rows = [], []
    for budget in (0.5, 0.25):
        maps = []
        for n in lengths:
            kept = np.zeros((layers, heads, n), dtype=bool)
            middle = rng.permuted(np.tile(np.arange(n - size), (layers, heads, 1)), axis=-1)
            np.put_along_axis(kept, middle[..., : int(budget * size)], True, axis=-1)
            kept[..., :4] = kept[..., n - size :] = True
            maps.append(kept)
        row = {"policy": "h2o", "budget": budget, "setting": "h2o", "budget_tokens": 2 * size}
        row |= {"head": 4, "recent": [size] * 3, "maps": pack(maps)}
        token_rows.append(row)
        states = [["kept", "masked", "summarised", "hidden", "kept", "kept"][:m] for m in (2, 4, 6)]
        row = {"policy": "mask", "budget": budget, "setting": "mask:m=2", "states": states}
        message_rows.append(row)
    return {
        "schema": 1,
        "title": "turn 3 of x.traj",
        "tokens": [f"tok{i} " for i in range(tokens)],
        "spans": [[i * size, (i + 1) * size, i] for i in range(6)],
        "messages": messages,
        "layers": layers,
        "heads": heads,
        "steps": [{"tokens": n, "messages": m} for n, m in zip(lengths, (2, 4, 6), strict=True)],
        "token_rows": token_rows,
        "message_rows": message_rows,
    }


def make_rows(policy: str = "h2o") -> list[dict[str, Any]]:
    row = {"policy": policy, "level": "token", "realisation": "kv", "budget": 0.5, "nll": 2.5}
    row |= {"nll_delta": 0.5, "nll_delta_low": 0.4, "nll_delta_high": 0.6, "kept_share": 0.5}
    row |= {"recomputed_tokens": 0, "fits": True, "mass_kept": 0.9}
    other = {"policy": "mask", "level": "message", "realisation": "text", "kept_share": 0.6}
    full = {"policy": "full", "level": "none", "realisation": "none", "budget": None, "nll": 2.0}
    return [row | full | {"kept_share": 1.0}, row, row | other | {"recomputed_tokens": 900}]


def write(folder: Path, view: Any, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write a run's folder with its page, and return the page."""
    whole = {"schema": 1, "command": "compare", "config": {}, "versions": {}}
    write_json(folder / "result.json", whole | {"rows": rows or make_rows()})
    if view is not None:
        (folder / "view.json").write_text(json.dumps(view))
    return report.run(folder)[0]


# -- the data -----------------------------------------------------------------------------------


def test_packed_maps_come_back() -> None:
    rng = np.random.default_rng(0)
    maps = [rng.random((3, 2, n)) < 0.5 for n in (1, 8, 9, 63)]
    back = unpack(pack(maps), 3, 2, [1, 8, 9, 63])
    assert all(np.array_equal(a, b) for a, b in zip(maps, back, strict=True))


@pytest.mark.parametrize(
    "text", ["*", base64.b64encode(b"x").decode(), pack([np.ones((1, 1, 9))]), pack([])]
)
def test_maps_of_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="maps"):
        unpack(text, 1, 1, [8])


def test_a_bomb_is_not_unpacked() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(10**8))).decode()
    began = time.process_time()
    with pytest.raises(ValueError, match="do not hold"):
        unpack(bomb, 1, 1, [8])
    assert time.process_time() - began < 0.2


def test_no_view_gives_a_page_without_panes(tmp_path: Path) -> None:
    html = write(tmp_path, None).read_text()
    assert load_view(tmp_path) is None
    assert "<script" not in html
    assert "script-src" not in html
    assert html.count("<svg") == 2


@pytest.mark.parametrize("schema", [None, 0, 2, True, "1"])
def test_another_schema_is_refused_with_file_and_remedy(tmp_path: Path, schema: Any) -> None:
    with pytest.raises(KvevictError, match=r"view\.json has schema .*kvevict compare"):
        write(tmp_path, make_view() | {"schema": schema})
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [1]}, r"view\.tokens\[0\] is no str"),
        ({"layers": True}, "layers is no int"),
        ({"layers": 3}, "maps do not hold"),
        ({"spans": [[0, 4]]}, "is not start, stop, message"),
        ({"spans": [[0, 99, 0]]}, "out of range"),
        ({"spans": [[4, 8, 1], [0, 4, 0]]}, "out of order"),
        ({"steps": []}, "do not ascend"),
        ({"steps": [{"tokens": 8, "messages": 2}]}, "the last step has 8 of 48"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no 'kind'"),
        ({"token_rows": [], "message_rows": []}, "no row"),
        ({"token_rows": {}}, "no list"),
    ],
)
def test_a_damaged_view_says_where(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(KvevictError, match=said):
        write(tmp_path, make_view() | change)


def test_rows_that_do_not_fit_the_steps_are_refused(tmp_path: Path) -> None:
    for kind, key, value, said in (
        ("token_rows", "recent", [1], "values of recent"),
        ("token_rows", "budget", float("nan"), "budget is no float"),
        ("message_rows", "states", [["kept"]], "not one state"),
        ("message_rows", "states", [["gone"] * m for m in (2, 4, 6)], "unknown state 'gone'"),
    ):
        view = make_view()
        view[kind][0][key] = value
        with pytest.raises(KvevictError, match=said):
            write(tmp_path, view)


def test_json_in_a_script_element_cannot_end_it() -> None:
    text = str(embedded({"x": EVIL, "lone": "\ud800"}))
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"x": EVIL, "lone": "\ud800"}


def test_the_page_allows_its_own_script_only(tmp_path: Path) -> None:
    html = write(tmp_path, make_view()).read_text()
    allowed = f"style-src 'unsafe-inline'; img-src data:; script-src {script_source()}"
    assert f"\"default-src 'none'; {allowed}\"" in html
    assert "unsafe-inline" not in html.split("script-src")[1].split('"')[0]
    assert html.count("<script") == html.count("</script>") == 2
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", html)
    makes_markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|</|<!--"
    assert not re.findall(makes_markup, SCRIPT)
    assert "url(" not in STYLE


def test_the_frontier_has_a_named_point_for_every_row() -> None:
    cost, share = figures("compare", make_rows())
    points = [(s.name, s.names, s.points, s.mark) for s in cost.series]  # type: ignore[union-attr]
    assert points == [
        ("full", ["full"], [(0, 2.0)], "diamond"),
        ("token, kv", ["h2o 50%"], [(0, 2.5)], "circle"),
        ("message, text", ["mask 50%"], [(900, 2.5)], "triangle"),
    ]
    assert share.series[0].points == [(0.5, 2.5), (1.0, 2.0)]  # type: ignore[union-attr]


def test_the_table_shows_the_measures_of_a_comparison(tmp_path: Path) -> None:
    html = write(tmp_path, None, make_rows("plugin")).read_text()
    heads = re.findall(r'<th class="(?:words|number)">([^<]+)</th>', html.split("<details>")[0])
    assert heads[:6] == ["policy", "level", "realisation", "budget", "nll", "nll delta"]
    assert "0.500 [0.400, 0.600]" in html
    assert "plugin 50%" in html


# -- in a browser --------------------------------------------------------------------------------

# Chromium reads commands from file descriptor 3 and answers on 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(a), fcntl.F_DUPFD, 20) for a in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.closerange(5, 256)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Chromium without a window, over the pipe of its DevTools protocol."""

    def __init__(self, profile: Path) -> None:
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(reads), str(writes), CHROMIUM, *flags],
            pass_fds=(reads, writes),
            stderr=subprocess.DEVNULL,
        )
        os.close(reads), os.close(writes)
        self._buffer, self._count, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        sent = {"id": self._count, "method": method, "params": params}
        if self._session:
            sent["sessionId"] = self._session
        os.write(self._out, json.dumps(sent).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._count:
                assert "error" not in found, found
                return found["result"]  # type: ignore[no-any-return]
            self.events.append(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], 60)[0], "Chromium does not answer"
            got = os.read(self._in, 1 << 20)
            assert got, "Chromium has gone"
            self._buffer += got
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)  # type: ignore[no-any-return]

    def open(self, page: Path) -> None:
        """Open a page in a tab of its own and wait for its panes."""
        self._session, self.events = "", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        tab = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = tab["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=page.as_uri())
        end = time.monotonic() + 60
        while self.js("document.readyState !== 'complete' || location.protocol !== 'file:'"):
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.05)
        self.js("Promise.all(window.kvevictPanes.map((p) => p.ready)).then(() => 0)")

    def js(self, expression: str) -> Any:
        how = {"awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", expression=expression, **how)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            pressed = {"type": kind, "key": key, "windowsVirtualKeyCode": code}
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", **pressed, **text)

    def complaints(self) -> list[dict[str, Any]]:
        """Return errors, warnings, violations of the policy, and windows that popped up."""
        self.js("0")  # what came before its answer has been read then
        bad = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        bad.add("Page.javascriptDialogOpening")
        return [e for e in self.events if e.get("method") in bad]

    def close(self) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(10)
        finally:
            self._process.kill()
            os.close(self._in), os.close(self._out)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def each(browser: Browser, selector: str, expression: str) -> Any:
    """Return an expression of every element `e` that a selector finds."""
    return browser.js(f"[...document.querySelectorAll(`{selector}`)].map((e) => {expression})")


def summaries(browser: Browser) -> list[str]:
    """Return what both panes say, after all drawing is done."""
    browser.js("kvevictPanes[0].idle.then(() => 0)")
    frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(0), 0)))"
    for _ in range(5):  # scrolling looks again for four
        browser.js(frame)
    return each(browser, ".summary", "e.textContent")  # type: ignore[no-any-return]


def choose(browser: Browser, name: str, value: int | str) -> list[str]:
    """Set a selector or the slider by its label."""
    change = f"(e.value = {value}, e.dispatchEvent(new Event(`input`, {{bubbles: true}})))"
    change += " && e.dispatchEvent(new Event(`change`))"
    assert each(browser, f'[aria-label^="{name}"]', change) == [True]
    return summaries(browser)


@needs_browser
def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    view = make_view()
    view["title"] = view["tokens"][0] = EVIL
    view["messages"][0] |= {"role": EVIL, "kind": EVIL, "text": EVIL}
    for row in (view["token_rows"][0], view["message_rows"][0]):
        row |= {"policy": EVIL, "setting": EVIL}
    browser.open(write(tmp_path, view, make_rows(EVIL)))
    assert browser.complaints() == []
    assert str(browser.events).count("Network.requestWillBeSent'") == 1  # the page alone
    assert browser.js("[document.scripts.length, document.images.length]") == [2, 0]
    for place in (".text .t", "option", ".setting"):
        assert browser.js(f"document.querySelector('{place}').textContent").startswith(EVIL)
    assert browser.js("document.querySelector('.who').textContent").startswith(f"1. {EVIL}")


@needs_browser
def test_panes_follow_slider_and_selectors(browser: Browser, tmp_path: Path) -> None:
    browser.open(write(tmp_path, make_view()))
    left, right = summaries(browser)
    assert "of 48 tokens on average over 6 layers and heads" in left
    assert right.startswith("kept 3 of 6 messages, 24 of 48 tokens")
    each(browser, "input[type=range]", "e.focus()")
    browser.press("ArrowLeft", 37)
    moved = summaries(browser)
    assert "of 32 tokens" in moved[0]
    assert moved[1].startswith("kept 1 of 4 messages, 8 of 32 tokens")
    assert each(browser, "output", "e.textContent") == ["2 of 3: 32 tokens, 4 messages"]
    assert "over 3 heads" in choose(browser, "Left: Layer", 1)[0]
    one = choose(browser, "Left: KV head", 2)[0]
    kept = unpack(make_view()["token_rows"][0]["maps"], 2, 3, [16, 32, 48])[1][1, 2]
    assert one.startswith(f"kept {kept.sum()} of 32 tokens in layer 1, head 2: 4 head, 8 recent")
    shown = each(browser, ".pane:first-child .t", "e.className")
    assert [" s-evicted" in c for c in shown[:32]] == (~kept).tolist()
    assert set(shown[32:]) == {"t later"}
    assert "messages" in choose(browser, "Left: Policy", 2)[0]
    assert each(browser, ".scroll", "e.className") == ["scroll cards messages"] * 2
    assert "tokens on average" in choose(browser, "Right: Policy", 0)[1]
    assert browser.complaints() == []


@needs_browser
def test_a_message_is_found_in_the_other_pane(browser: Browser, tmp_path: Path) -> None:
    browser.open(write(tmp_path, make_view(tokens=6000)))
    each(browser, ".pane:first-child .block:nth-child(5) button", "e.focus()")
    browser.press("Enter", 13)
    summaries(browser)
    assert each(browser, ".picked", "e.message") == [4, 4]
    each(browser, ".pane:last-child .block:nth-child(4)", "e.click()")
    summaries(browser)
    assert each(browser, ".picked", "e.message") == [3, 3]
    top = "e.getBoundingClientRect().top - e.parentNode.getBoundingClientRect().top"
    assert abs(each(browser, ".pane:first-child .picked", top)[0] - 8) < 20
    choose(browser, "Left: Show", "`cards`")  # stays in sight
    assert abs(each(browser, ".pane:first-child .picked", top)[0] - 8) < 300
    (link,) = each(browser, ".link", "e.textContent")
    assert link.startswith("4. tool (text), 1,000 tokens | left, h2o, 50%: ")
    assert link.endswith("right, mask, 50%: hidden")
    browser.press("Escape", 27)
    assert each(browser, ".picked", "e.message") == []
    assert browser.complaints() == []


@needs_browser
def test_a_long_history_redraws_in_a_blink(browser: Browser, tmp_path: Path) -> None:
    browser.open(write(tmp_path, make_view(tokens=8190, layers=30, heads=3)))
    choose(browser, "Right: Policy", 1)  # tokens on both sides
    spent = []
    for step in (0, 2, 1, 2, 0, 2):
        choose(browser, "Step", step)
        spent.append(browser.js("[kvevictPanes[0].redrawMs, kvevictPanes[0].paintMs]"))
    print("redraw, with paint (ms):", [[round(x, 1) for x in s] for s in spent])
    assert browser.js("kvevictPanes[0].redraws") >= 8
    assert browser.js("kvevictPanes[0].error") is None
    assert min(s[1] for s in spent[1:]) < 300
    assert browser.complaints() == []
