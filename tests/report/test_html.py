"""The report page: its document against the program, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipelines import pipeline
from planned import program
from typer.testing import CliRunner

from autoshard.cli.main import app
from autoshard.cluster import load_cluster
from autoshard.errors import UsageError
from autoshard.passes.pipeline import NUMBERED
from autoshard.program.program import NodeNote, Program
from autoshard.program.store import save_program
from autoshard.report.document import VERSION, document
from autoshard.report.dot import dot_text
from autoshard.report.html import page, script_json
from autoshard.simulate.estimate import Estimator
from autoshard.simulate.step import estimate_step

CPU = load_cluster("cpu-gloo")
MESH = "dp=2,tp=2"
FIELDS = frozenset(
    (
        *("version", "autoshard", "title", "mesh", "axes", "ranks", "cluster", "device", "microbatches"),
        *("options", "step", "memory", "plan", "segments", "modules", "parameters", "collectives", "lines"),
        *("passes", "timeline", "streams"),
    )
)
NODE_FIELDS = frozenset(
    ("outs", "op", "type", "layout", "refs", "module", "source", "why", "compute", "comm", "payload")
)
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&\u2028\"'"


def llama() -> Program:
    return program("llama", MESH, reasons=True)


def pipe() -> Program:
    return pipeline("llama-deep", 2, "dp=2", "1f1b", 4)


# -- the document -------------------------------------------------------------------------------------------


def test_the_schema() -> None:
    """Fields may be added; to rename or drop one, raise VERSION."""
    found = document(llama(), CPU)
    assert found["version"] == VERSION == 2
    assert set(found) == FIELDS
    assert set(found["segments"][0]["nodes"][0]) >= NODE_FIELDS
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("make", [llama, pipe], ids=["whole", "pipeline"])
def test_costs_are_those_of_the_estimate(make: Any) -> None:
    made = make()
    found = document(made, CPU)
    estimator = Estimator(made, CPU)
    often = [1 if p.phase in ("gather", "reduce") else made.microbatches for p in made.lowered.parts]
    parts = [estimator.priced(made.lowered.of(p)) for p in made.lowered.parts]
    sums = [part for part, times in zip(parts, often, strict=True) for _ in range(times)]
    root = found["modules"][0]
    assert root["path"] == ""
    assert root["compute"] == pytest.approx(sum(s.compute for s in sums))
    assert root["comm"] == pytest.approx(sum(s.comm for s in sums))
    assert root["forward"] + root["backward"] == pytest.approx(root["compute"] + root["comm"])
    sent = sum(row["payload"] * row["runs"] for row in found["collectives"])
    assert sent == pytest.approx(sum(s.wire for s in sums)) == pytest.approx(root["payload"])
    step = estimate_step(made, CPU)
    assert found["step"]["seconds"] == step.seconds
    assert sum(p["seconds"] for p in found["step"]["parts"]) == pytest.approx(step.seconds)
    assert sum(p["bytes"] for p in found["memory"]["parts"]) == pytest.approx(step.fullest.peak)


def test_modules_hold_what_is_inside_them() -> None:
    rows = {row["path"]: row for row in document(llama(), CPU)["modules"]}
    assert rows["model.layers.*"]["layers"] == 2 and rows["model"]["layers"] == 1
    cut = {row["path"]: row for row in document(pipe(), CPU)["modules"]}
    assert cut["model.layers.*"]["layers"] == 5  # however the stages share them
    for path, row in rows.items():
        inner = [r for p, r in rows.items() if p and p != path and p.rpartition(".")[0] == path]
        assert sum(r["compute"] for r in inner) <= row["compute"] * (1 + 1e-9)
        if path:
            assert path.rpartition(".")[0] in rows


@pytest.mark.parametrize("make", [llama, pipe], ids=["whole", "pipeline"])
def test_memory_reaches_the_peak_of_every_rank(make: Any) -> None:
    made = make()
    found, step = document(made, CPU)["timeline"], estimate_step(made, CPU)
    for rank, flat in enumerate(found["levels"]):
        assert max(flat[3::4]) == pytest.approx(step.ranks[rank].peak, abs=1)
        assert all(held <= peak for held, peak in zip(flat[2::4], flat[3::4], strict=True))
        assert len(flat) // 4 == len(found["spans"][rank]) // 5 + 1


def test_parameters_of_all_ranks_of_a_pipeline() -> None:
    made = pipe()
    rows = document(made, CPU)["parameters"]
    params = [p for p in made.signature.ports if p.kind == "param"]
    assert sum(r["count"] for r in rows if r["kind"] == "param") == len(params)
    assert sum(r["global_bytes"] for r in rows if r["kind"] == "param") == sum(p.type.nbytes for p in params)


#: functions of a dump that are parts of main
PHASES = ("gather", "forward", "backward", "weight", "reduce")


def test_passes_hold_the_text_of_the_dumps() -> None:
    made = llama()
    found = document(made, CPU)
    assert [p["name"] for p in found["passes"]] == sorted(made.dumps)
    for one in found["passes"]:
        text = made.dumps[one["name"]]
        for segment, numbers in one["segments"].items():
            lines = [found["lines"][k] for k in numbers]
            assert lines[0].startswith(f"def {segment}(")
            # a part of main ends with its last op
            assert segment in PHASES or lines[-1].lstrip().startswith("return")
            assert all(line in text for line in lines)


def test_depth_costs_nothing() -> None:
    """Repeated layers stand in the document once."""
    sizes = []
    for made in (program("llama", "dp=2", reasons=True), program("llama-deep", "dp=2", reasons=True)):
        found = document(made, CPU)
        sizes.append(len(json.dumps([found[k] for k in ("segments", "modules", "lines", "passes")])))
    assert sizes[1] < 1.1 * sizes[0]


# -- the page as text ---------------------------------------------------------------------------------------


def hostile() -> Program:
    """A program whose names, lines and reasons try to leave the page's script."""
    made = llama()
    notes = {k: tuple(NodeNote(HOSTILE, HOSTILE, HOSTILE) for _ in rows) for k, rows in made.notes.items()}
    return replace(made, notes=notes, target=HOSTILE, options=(("batch", HOSTILE),))


def test_nothing_in_a_name_leaves_its_place() -> None:
    found = document(hostile(), CPU)
    text = page(found)
    assert text.count("</script") == page(document(llama(), CPU)).count("</script")
    assert "<img" not in text
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert block is not None and not set("<>&\u2028\u2029") & set(block.group(1))
    assert json.loads(block.group(1)) == json.loads(json.dumps(found))
    assert json.loads(script_json({"a": HOSTILE}))["a"] == HOSTILE
    # a place of the template in a name stays text
    odd = replace(llama(), target="<!--script--><!--data-->")
    assert page(document(odd, CPU)).count("drawOverview") == text.count("drawOverview")


def test_the_page_asks_for_nothing_from_outside() -> None:
    text = page(document(llama(), CPU))
    assert "default-src 'none'" in text
    code = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    assert not re.search(r"https?://(?!www\.w3\.org/)", code)
    for word in (
        "fetch(",
        "XMLHttpRequest",
        "import(",
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "eval(",
    ):
        assert word not in code, word


# -- Graphviz -----------------------------------------------------------------------------------------------


def test_dot() -> None:
    found = document(llama(), CPU)
    text = dot_text(found)
    nodes = sum(
        len(s["nodes"]) + len(s["inputs"]) for s in found["segments"] if s["name"] not in ("main", "once")
    )
    assert text.count("[label=") == nodes and text.count("{") == text.count("}")
    assert "all_reduce over" in text or "all_gather over" in text
    one = next(s for s in found["segments"] if s["layers"])
    part = dot_text(found, one["name"])
    assert part.count("subgraph") == 1
    assert part.count(" -> s") == sum(len(n["refs"]) for n in one["nodes"])
    with pytest.raises(UsageError, match="no segment"):
        dot_text(found, "nothing")
    odd = dot_text(document(hostile(), CPU))
    assert all(len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0 for line in odd.split("\n"))


# -- the command --------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    save_program(llama(), tmp_path / "program")
    folder = str(tmp_path / "program")

    def invoke(*words: str) -> Any:
        return CliRunner().invoke(app, ["inspect", folder, *words])

    html, dot = tmp_path / "page.html", tmp_path / "graph.dot"
    result = invoke("--html", str(html), "--dot", str(dot))
    assert result.exit_code == 0 and "written" in result.stdout
    assert html.read_text().startswith("<!doctype html>") and dot.read_text().startswith("digraph")
    found = json.loads(invoke("--html", str(html), "--json").stdout)
    assert found["document"]["version"] == 2 and found["written"]["html"] == str(html)
    segment = found["document"]["segments"][0]["name"]
    assert invoke("--dot", str(dot), "--segment", segment).exit_code == 0
    for words in (
        ("--html", str(html), "--rank", "0"),
        ("--html", str(html), "--segment", segment),
        ("--html", str(html), "--timeline"),
        ("--html", str(tmp_path / "no" / "where.html")),
        ("--dot", str(dot), "--segment", "nothing"),
    ):
        assert invoke(*words).exit_code == 2, words


# -- in a browser -------------------------------------------------------------------------------------------


FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--no-first-run", "--window-size=1280,900"),
)


class Browser:
    """A headless Chromium that shows pages from files."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def show(self, found: dict[str, Any], address: str = "", wide: int = 1280, high: int = 800) -> None:
        path = self.folder / "page.html"
        path.write_text(page(found), encoding="utf-8")
        size = {"width": wide, "height": high, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.driver.get(f"{path.as_uri()}#{address}")
        assert self.js("document.documentElement.dataset.ready") is not None, self.log()

    def js(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def count(self, selector: str) -> int:
        return int(self.js(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def press(self, keys: str, selector: str = "body") -> None:
        self.driver.find_element("css selector", selector).send_keys(keys)

    def go(self, address: str) -> None:
        """Change the address as a link does, and wait until the page has drawn it; a key may have changed it
        just now, of which the page has yet to hear."""
        self.driver.execute_async_script(
            "const done = arguments[1], told = (location.hash || '#') === `#${arguments[0]}`;"
            "addEventListener('hashchange', () => setTimeout(done), { once: true });"
            "if (told) dispatchEvent(new HashChangeEvent('hashchange')); else location.hash = arguments[0];",
            address,
        )

    def log(self) -> list[str]:
        """Errors of the page."""
        return [row["message"] for row in self.driver.get_log("browser") if row["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs Chromium and its chromedriver, and finds none on the path")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium to drive a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in FLAGS:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    driver.set_script_timeout(200)  # of a machine that is busy with other things
    yield Browser(driver, tmp_path_factory.mktemp("page"))
    driver.quit()


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return document(llama(), CPU)


def test_every_tab_draws(browser: Browser, whole: dict[str, Any]) -> None:
    browser.show(whole)
    assert browser.count("#tree .row") >= 6 and "dp 2" in browser.text("#mesh")
    for key, tab in enumerate(("overview", "graph", "passes", "timeline", "collectives", "parameters"), 1):
        browser.press(str(key))
        browser.go(f"tab={tab}" if tab != "overview" else "")
        assert browser.js(f"!document.getElementById('{tab}').hidden")
        assert browser.text('#tabs [aria-selected="true"]').startswith(tab)
        assert len(browser.text(f"#{tab}")) > 40
    assert not browser.log()


def test_the_graph_of_a_module(browser: Browser, whole: dict[str, Any]) -> None:
    browser.show(whole, "tab=graph&module=model.layers.1.mlp")  # of one layer: those that are alike
    assert browser.js("state.module") == "model.layers.*.mlp"
    names = browser.js("[...document.querySelectorAll('#canvas .item.module')].map((x) => x.dataset.name)")
    assert {"gate_proj", "up_proj", "down_proj"} <= set(names)
    collapsed = browser.count("#canvas .item")
    browser.go("tab=graph&module=model.layers.*.mlp&all=1&views=1&weights=1")
    segment = browser.js("bestSegment('model.layers.*.mlp', 'forward').name")
    nodes = [
        n
        for s in whole["segments"]
        if s["name"] == segment
        for n in s["nodes"]
        if n["module"].startswith("model.layers.*.mlp")
    ]
    assert browser.count("#canvas .item.op, #canvas .item.talk") == len(nodes) > collapsed / 2
    product = next(n for n in nodes if n["op"] == "mm")
    browser.go(f"tab=graph&module=model.layers.*.mlp&all=1&segment={segment}&op={product['outs'][0]}")
    assert browser.count("#canvas .item.chosen") == 1
    details = browser.text("#details")
    assert product["type"] in details and product["source"] in details and product["why"] in details
    # no box lies on another one
    boxes = browser.js(
        "[...document.querySelectorAll('#canvas .item rect.box')].map((x) => x.getBoundingClientRect())"
        ".map((r) => [r.left, r.top, r.right, r.bottom])"
    )
    for k, (left, top, right, bottom) in enumerate(boxes):
        for a, b, c, d in boxes[:k]:
            assert right <= a + 1 or c <= left + 1 or bottom <= b + 1 or d <= top + 1
    assert not browser.log()


def test_the_slider_over_the_passes(browser: Browser, whole: dict[str, Any]) -> None:
    browser.show(whole, f"tab=passes&module=model.layers.*&pass={NUMBERED['normalize']}")
    assert browser.text("#passes-bar .pass") == NUMBERED["normalize"]
    browser.press("]")
    browser.go(f"tab=passes&module=model.layers.*&pass={NUMBERED['insert_collectives']}")
    assert browser.text("#passes-bar .pass") == NUMBERED["insert_collectives"]
    added = browser.js("[...document.querySelectorAll('#code .added .text')].map((x) => x.textContent)")
    assert any("comm." in line for line in added)
    changed = browser.js("[...document.querySelectorAll('#code .changed ins')].map((x) => x.textContent)")
    assert any("dp:" in text for text in changed)
    # what stays, changes and comes is the text of the pass
    segment = browser.js("document.querySelector('#passes-bar select').value")
    numbers = next(p for p in whole["passes"] if p["name"] == NUMBERED["insert_collectives"])["segments"][
        segment
    ]
    shown = browser.js(
        "[...document.querySelectorAll('#code .line:not(.removed) .text')].map((x) => { "
        "const y = x.cloneNode(true); y.querySelectorAll('del').forEach((d) => d.remove()); "
        "return y.textContent; })"
    )
    assert [line.rstrip() for line in shown] == [whole["lines"][k] for k in numbers]
    assert not browser.log()


def test_search_and_keys(browser: Browser, whole: dict[str, Any]) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.show(whole)
    browser.press("/")
    browser.press("layers.1.mlp.up_proj", "#search")
    assert browser.text("#found [aria-selected]").split()[0] in ("module", "parameter")
    browser.press(Keys.ENTER, "#search")
    browser.go("tab=graph&module=model.layers.*.mlp.up_proj")
    assert browser.js("state.module") == "model.layers.*.mlp.up_proj"
    browser.press("k")
    assert browser.js("read().module") != "model.layers.*.mlp.up_proj"
    theme = browser.js("document.documentElement.dataset.theme")
    browser.press("t")
    assert browser.js("document.documentElement.dataset.theme") != theme
    browser.press("t")
    browser.press("?")
    assert browser.js("document.getElementById('keys').open") is True
    browser.press(Keys.ESCAPE)
    assert browser.js("document.getElementById('keys').open") is False
    browser.press("/")
    browser.press("no such thing at all", "#search")
    assert "nothing has that name" in browser.text("#found")
    assert not browser.log()


def test_tables_sort(browser: Browser, whole: dict[str, Any]) -> None:
    browser.show(whole, "tab=collectives")
    assert browser.count("#collectives tbody tr") == len(whole["collectives"])
    browser.js("document.querySelectorAll('#collectives th')[2].click()")
    wires = [row["payload"] for row in whole["collectives"]]
    order = browser.js(
        "[...document.querySelectorAll('#collectives tbody tr')].map((r) => r.children[2].innerText)"
    )
    assert order[0] == browser.js(f"bytes({max(wires)})") and order[-1] == browser.js(f"bytes({min(wires)})")
    assert not browser.log()


def test_a_pipeline_in_time(browser: Browser) -> None:
    found = document(pipe(), CPU)
    browser.show(found, "tab=timeline")
    assert "1f1b" in browser.text("#timeline h2") and browser.count("#timeline canvas") == 3
    # the first action of rank 0 is forward, drawn in its colour, and what the pointer says it is
    pixel = browser.js(
        "(() => { const c = document.getElementById('gantt'); const s = c.width / c.clientWidth;"
        "return [...c.getContext('2d').getImageData((92 + 3) * s, 4 * s, 1, 1).data].slice(0, 3); })()"
    )
    wanted = browser.js("colour('F').match(/\\w\\w/g).map((h) => parseInt(h, 16))")
    assert all(abs(a - b) <= 3 for a, b in zip(pixel, wanted, strict=True))
    assert browser.js("actionAt(0, 10)").startswith("forward of microbatch 0, stage 0")
    assert not browser.log()


def test_hostile_names_in_a_browser(browser: Browser) -> None:
    found = document(hostile(), CPU)
    for tab in ("overview", "graph", "passes", "collectives", "parameters"):
        browser.show(found, f"tab={tab}")
        assert browser.js("document.title") != "owned" and browser.count("img") == 0
        assert browser.count("script") == 2
    assert HOSTILE.split("&", maxsplit=1)[0] in browser.text("#title")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(browser: Browser, whole: dict[str, Any], theme: str) -> None:
    """WCAG 2 AA: 4.5 to 1 for every text against what is behind it."""
    browser.show(whole, "tab=overview")
    browser.js(f"void (document.documentElement.dataset.theme = '{theme}')")
    names = ("ink", "soft", "accent", "talk", "held", "removed-ink", "added-ink")
    values = browser.js(
        f"Object.fromEntries({json.dumps([*names, 'back', 'raised'])}.map((n) => [n, colour(n)]))"
    )
    for name in names:
        assert contrast(values[name], values["back"]) >= 4.5, (theme, name)
    assert contrast(values["soft"], values["raised"]) >= 4.5


def contrast(one: str, other: str) -> float:
    def light(value: str) -> float:
        parts = [int(value[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_it_fits_small_screens(browser: Browser, whole: dict[str, Any]) -> None:
    for wide in (1280, 900):
        browser.show(whole, "tab=graph&module=model.layers.*", wide)
        assert browser.js("document.documentElement.scrollWidth") <= wide
