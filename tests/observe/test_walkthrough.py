"""The walkthrough in a browser: it computes what Python computes, shows what is chosen, and needs nothing but its file.

quick plan --walkthrough.write--> page.html --Chromium from file://--> numbers, clicks, keys, sizes, colours
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from moejax import config_io
from moejax.errors import UserError
from moejax.hardware.gpus import read_gpu
from moejax.mesh import parse_mesh
from moejax.observe import walkthrough
from moejax.parallel.schedule_makers import NAMES, make_schedule
from moejax.planning.quick import quick_plan
from moejax.planning.report import to_json
from moejax.planning.setup import make_setup

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MODEL, OWN = "configs/ultra_128e.yaml", ("dp=8,ep=8,pp=8", "interleaved_1f1b", 128)
LETTERS = " FBIW"  # of `schedules.Op`


def plan(mesh: str, schedule: str, microbatches: int) -> dict:
    settings = [f"parallel.pipeline.schedule={schedule}", f"parallel.pipeline.microbatches={microbatches}"]
    config = config_io.load(str(ROOT / MODEL), [*settings, "parallel.pipeline.chunks=null"])
    return json.loads(json.dumps(to_json(quick_plan(make_setup(config, parse_mesh(mesh), read_gpu("b300"), MODEL)))))


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        assert "MOEJAX_BROWSER" not in os.environ, "CI tests the page and has no chromium"
        pytest.skip("no chromium on PATH; on Debian: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    walkthrough.write(path, plan(*OWN))
    return path


@pytest.fixture
def page(browser, file):
    """The page, opened from disk; what it complains of and asks for must stay empty."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened, faults = context.new_page(), []
    opened.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else faults.append(r.url))
    opened.goto(file.as_uri())
    yield opened
    context.close()
    assert not faults


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_those_of_the_executor(page, name):
    usual = 2 if name in ("interleaved_1f1b", "zero_bubble_v") else 1
    more = 3 if name in ("gpipe", "interleaved_1f1b", "zero_bubble") else usual
    for stages, microbatches, chunks in ((2, 5, usual), (4, 4, more), (4, 9, more), (8, 3, usual)):
        sizes = [name, stages, microbatches, chunks]
        table = page.evaluate("([n, s, m, c]) => makeSchedule(n, s, m, c).table", sizes)
        ours = make_schedule(name, stages, microbatches, chunks)
        theirs = [[(c["op"], c["m"], c["chunk"]) if c else (" ", -1, -1) for c in row] for row in table]
        cells = np.stack([ours.op, ours.microbatch, ours.chunk], axis=-1).tolist()
        assert theirs == [[(LETTERS[op], m, chunk) for op, m, chunk in row] for row in cells]


@pytest.mark.parametrize(
    ("mesh", "schedule", "microbatches"),
    [
        OWN,
        ("dp=4,ep=16,pp=8", "1f1b", 64),
        ("dp=2,ep=4,pp=16", "zero_bubble", 32),
        ("dp=16,ep=1,pp=4", "gpipe", 16),
        ("dp=1,ep=64,pp=2", "zero_bubble_v", 8),
        ("dp=2,ep=8,pp=1", "1f1b", 64),
    ],
)
def test_numbers_are_those_of_the_planner(page, mesh, schedule, microbatches):
    ours = plan(mesh, schedule, microbatches)
    choice = {a: getattr(parse_mesh(mesh), a) for a in ("dp", "ep", "pp")}
    choice |= {"schedule": schedule, "microbatches": microbatches, "routing": "balanced"}
    made = page.evaluate("(choice) => compute(REPORT, choice, false)", choice)
    assert made["problem"] is None
    exact = ["weights", "master", "moments", "gradients", "stash", "dispatch"]
    exact += ["saved", "temporaries"] if (mesh, schedule, microbatches) == OWN else []
    for name in exact:
        np.testing.assert_allclose(
            made["categories"][name], ours["memory"]["categories"][name], rtol=1e-3, err_msg=name
        )
    assert (made["tokens"], made["rows"]) == (ours["settings"]["tokens"], ours["settings"]["capacity_rows"])
    assert made["exchange"]["name"] == ours["settings"]["transport"]
    sent = lambda rows, axes: {(c["kind"], axes(c), c["purpose"], c["link"]): c["bytes"] for c in rows if c["bytes"]}  # noqa: E731
    theirs, expected = (
        sent(made["collectives"], lambda c: "+".join(c["axes"])),
        sent(ours["collectives"], lambda c: c["axis"]),
    )
    assert theirs.keys() == expected.keys()
    for key, size in expected.items():
        np.testing.assert_allclose(theirs[key], size, rtol=1e-3, err_msg=str(key))


def test_it_opens_with_the_plan_and_follows_what_is_chosen(page):
    report = plan(*OWN)
    assert report["verdict"]["sentence"] in page.inner_text("header")
    assert page.locator("#devices rect").count() == 512 and page.locator("#devices .stage").count() == 8
    before = page.inner_text("#traffic tbody"), page.inner_text("#device")
    page.select_option("#ep", "16")
    page.select_option("#dp", "4")
    assert page.locator("#devices rect").count() == 512
    assert page.inner_text("#traffic tbody") != before[0] and page.inner_text("#device") != before[1]
    assert "0–7 of 128" in page.inner_text("#device")
    page.select_option("#ep", "8")
    assert page.locator("#devices rect").count() == 256
    page.select_option("#dp", "128")  # 8,192 sequences a step, 128 microbatches: too few for 1,024 devices a stage
    assert "fewer microbatches" in page.inner_text("#status")
    page.click("#reset")
    assert (page.inner_text("#traffic tbody"), page.inner_text("#device")) == before
    page.select_option("#routing", "collapsed")
    assert "rounds" in page.inner_text("#walk-facts")


def test_timeline_and_tokens_play(page):
    page.click("#timeline-play")
    page.wait_for_function("Number(document.getElementById('tick').value) > 2 && state.timers.timeline !== undefined")
    page.click("#timeline-play")
    stopped = page.input_value("#tick")
    page.wait_for_timeout(100)
    assert page.input_value("#tick") == stopped
    page.click("#walk-play")
    page.wait_for_function("document.getElementById('walk').dataset.phase === '2'")
    first = page.locator("#walk circle").first
    x, y = first.get_attribute("cx"), first.get_attribute("cy")
    page.wait_for_function(
        "([x, y]) => { const c = document.querySelector('#walk circle');"
        " return c.getAttribute('cx') !== x || c.getAttribute('cy') !== y; }",
        arg=[x, y],
    )


def test_it_works_by_keyboard(page):
    page.focus("#devices")
    for key, place in (
        ("ArrowRight", "pp 0, dp 0, ep 1"),
        ("ArrowDown", "pp 0, dp 1, ep 1"),
        ("PageDown", "pp 1, dp 1, ep 1"),
    ):
        page.keyboard.press(key)
        assert place in page.inner_text("#device")
    page.focus("#tick")
    page.keyboard.press("Home")
    assert page.inner_text("#tick-text").startswith("Tick 0")
    page.focus("#walk-step")
    page.keyboard.press("Enter")
    assert page.inner_text("#walk-text").startswith("Router")
    names = page.evaluate(
        "[...document.querySelectorAll('button,select,input')].every(e => e.labels?.length || e.textContent)"
    )
    assert names, "every control has a name"


def test_narrow_dark_and_still(page):
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.click("#walk-play")  # a phase at a time, without motion
    assert page.evaluate("state.timers.walk === undefined && document.getElementById('walk').dataset.phase === '1'")


def test_a_picture_is_kept(page, tmp_path):
    """CI keeps it at docs/images/walkthrough.png (MOEJAX_SCREENSHOT)."""
    target = Path(os.environ.get("MOEJAX_SCREENSHOT", tmp_path / "walkthrough.png"))
    target = target if target.is_absolute() else ROOT / target
    page.set_viewport_size({"width": 1120, "height": 1450})
    for _ in range(3):
        page.click("#walk-step")
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=target)
    assert 20_000 < target.stat().st_size < 300_000


def test_the_page_is_one_file_and_data_cannot_break_it():
    report = plan(*OWN)
    report["model"]["name"] = "</script><b>&\u2028"
    text = walkthrough.page(report)
    assert text.count("</script>") == 5 and "\\u003c/script>" in text
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "") and "https:" not in text
    assert "/*" + "report*/" not in text and all(f"/*{name}*/" not in text for name in walkthrough.PARTS)


def test_an_unwritable_place_is_told():
    with pytest.raises(UserError, match="/nowhere/plan.html"):
        walkthrough.write("/nowhere/plan.html", plan(*OWN))
