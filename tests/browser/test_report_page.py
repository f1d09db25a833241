"""The report page in a real browser: it is quiet, asks for nothing, and does what a reader expects of it."""

import base64
import json
import math
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

import unskew
from unskew.analysis.measure import Choice, Column, Table, tabulate
from unskew.charts import Axis, Bars, Cells, Chart, Dots, Line, Picture, Rule
from unskew.report.page import Page, Section, to_html
from unskew.runs.seals import seal_folder

LONG = "a_class_name_without_any_place_to_break_it_" * 5
NASTY = "</script></style><img src=x onerror=alert(1)> \"quotes\" 'and' &amp; שלום עולם 🦊"

SVG = "{http://www.w3.org/2000/svg}"


def curve(name="accuracy", title="Test accuracy by round", width=440, slope=0.1):
    x = list(range(1, 41))
    y = [0.75 - 0.65 * math.exp(-slope * at) for at in x]
    tips = [f"round {at}: {100 * value:.1f} %" for at, value in zip(x, y, strict=True)]
    line = Line(x=x, y=y, name="fedavg", points=True, tips=tips)
    lower = Line(x=x, y=[0.8 * value for value in y], name="fedprox(mu=0.01)", colour=1, dashed=True)
    return Chart(
        name=name, title=title, alt=f"{title}: rises from 14 % to 74 %",
        marks=[line, lower, Rule(y=0.75, label="pooled")],
        x=Axis("round", kind="count"), y=Axis("accuracy", low=0, high=1, kind="percent"), width=width,
    )  # fmt: skip


def bars(client, classes=10):
    counts = [1 + (7 * client + 13 * label) % 40 for label in range(classes)]
    tips = [f"client {client}, class {label}: {count}" for label, count in enumerate(counts)]
    return Chart(
        name=f"classes-{client}", title=f"Examples of client {client} by class", alt=f"What client {client} has",
        marks=[Bars(x=list(range(classes)), height=counts, colour=client % 10, tips=tips)],
        x=Axis("class", kind="count"), y=Axis("examples", low=0, kind="count"),
    )  # fmt: skip


def cells(name="confusion", size=10, width=440):
    values = [[math.exp(-abs(i - j)) for j in range(size)] for i in range(size)]
    tips = [[f"{i} taken for {j}: {value:.2f}" for j, value in enumerate(row)] for i, row in enumerate(values)]
    ticks = tuple((float(at), str(at)) for at in range(size))
    return Chart(
        name=name, title="Confusion", alt="Mostly on the diagonal",
        marks=[Cells(values=values, low=0, high=1, tips=tips)],
        x=Axis("predicted", ticks=ticks), y=Axis("true", ticks=ticks), width=width, height=360, square=True,
    )  # fmt: skip


def dots():
    turn = [0.4 * at for at in range(120)]
    x, y = [a * math.cos(a) for a in turn], [a * math.sin(a) for a in turn]
    tips = [f"example {at}" for at in range(120)]
    return Chart(
        name="embedding", title="Features of the last layer", alt="A spiral", frame=False, square=True,
        marks=[Dots(x=x, y=y, colour=[at % 10 for at in range(120)], tips=tips)],
    )  # fmt: skip


def pictures():
    shade = [[(13 * i * j) % 256 for j in range(8)] for i in range(8)]
    marks = [Picture(shade, float(at), 0, 0.9, 0.9, label=str(at), tip=f"digit {at}") for at in range(8)]
    return Chart("digits", "Confused most", "Eight digits", marks, frame=False, width=900, height=140)


CLIENTS = tabulate(
    "Clients",
    {"client": "text", "examples": "count", "accuracy": "percent", "sent": "bytes"},
    [
        ["client 10", 120, 0.6279, 1_540_000],
        ["client 2", 9, None, 0],
        ["client 1", 1100, 0.9, 2_000_000_000],
        ["client 7", 120, 0.07, 1_540],
        ["", 45, 1.0, None],
    ],
    note="Empty: the client has no test examples.",
)
RUNS = Table(
    "Runs",
    [Column("run"), Column("method"), *(Column(f"figure {k}", "number") for k in range(14)), Column("time", "seconds")],
    [[f"run {at} {LONG * (at == 1)}", "fedavg", *(at / (1 + k) for k in range(14)), 37.5 * at] for at in range(12)],
)
ROUNDS = tabulate("Rounds", {"round": "count", "loss": "number"}, [[at, 1 / (1 + at)] for at in range(350)])
AWFUL = Table(NASTY, [Column(NASTY), Column("n", "number")], [[NASTY, 1.5], [LONG, math.nan]])

RICH = Page(
    title="digits · fedavg + ccvr",
    subtitle="10 clients, dirichlet(alpha=0.1), 40 rounds of 5 clients; seed 0",
    findings=["The federation reaches 74.1 %, 12.3 points below central training.", "Calibration adds 8.9 points."],
    facts=[("Method", "fedavg + ccvr(samples=100)"), ("Rounds", "40"), ("Folder", f"/runs/{LONG}")],
    sections=[
        Section(
            "accuracy",
            "Accuracy",
            "Accuracy on the test examples after each round.\n\nPoint at a mark to read its value.",
            [curve(), cells(), curve("drift", "Drift of the clients from the global model, by round", width=900)],
            findings=["The federation ends at 74.1 %.", "It loses most between rounds 3 and 9."],
            missing=["the accuracy by client: the run kept no models of clients"],
        ),
        Section(
            "clients",
            "Clients",
            "What each client holds, and how the model does there.",
            [
                Choice("client", {f"client {at}": bars(at) for at in range(6)}, start="client 2"),
                Choice("client", {f"client {at}": curve("c", f"Accuracy of client {at}") for at in range(5)}),
                Choice("layer", {name: curve(name, f"Drift of {name}", width=900) for name in ("conv1", "head")}),
                CLIENTS,
            ],
        ),
        Section("features", "Features", "Where the last layer puts the examples.", [dots(), pictures()]),
        Section("wide", "Runs side by side", "", [RUNS, ROUNDS]),
        Section("nasty", NASTY, NASTY, [AWFUL], [NASTY], [NASTY]),
        Section("nothing", "Nothing to show", missing=["the landscape: the run has no checkpoints"]),
    ],
    footer="Written by unskew 0.1.0",
)

FIRST = "#clients .choice:nth-of-type(1)"
SECOND = "#clients .choice:nth-of-type(2)"


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html(RICH), encoding="utf-8")
    return path


@pytest.fixture
def page(tab, rich):
    """A tab that shows the rich page."""
    tab.open(rich)
    return tab


def shown(tab, choice):
    """The titles of the figures of a choice that can be seen."""
    return tab.ask(f"[...document.querySelectorAll('{choice} figure')].filter(f => f.checkVisibility())"
                   ".map(f => f.querySelector('h3').textContent)")  # fmt: skip


def column(tab, table, place):
    rows = f"[...document.querySelectorAll('[aria-label=\"{table}\"] tbody tr')]"
    return tab.ask(f"{rows}.map(row => row.cells[{place}].textContent)")


def visible(tab, selector):
    return tab.ask(f"[...document.querySelectorAll('{selector}')].filter(e => e.checkVisibility()).length")


def focus(tab, selector):
    tab.ask(f"document.querySelector('{selector}').focus()")


def tip(tab):
    return tab.ask("document.querySelector('.tip').checkVisibility() ? document.querySelector('.tip').textContent : ''")


def colours(tab):
    return tab.ask("getComputedStyle(document.querySelector('main')).color")


DAY, NIGHT = "rgb(28, 33, 39)", "rgb(228, 231, 234)"


def test_the_browser_notices_what_a_page_must_not_do(tab, tmp_path):
    """The watch itself: every other test ends with it."""
    bad = tmp_path / "bad.html"
    script = "console.warn('careful'); setTimeout(() => { throw Error('oh') })"
    bad.write_text(f"<title>bad</title><img src='other.png'><script>{script}</script>")
    tab.open(bad)
    tab.wait(lambda: len(tab.complaints()) >= 4, "the page to misbehave")
    assert {complaint.split(":")[0] for complaint in tab.complaints()} == {"console", "thrown", "log", "request"}
    tab.browser.events.clear()


def test_a_rich_page_asks_for_nothing_but_itself_and_text_from_outside_stays_text(page, rich):
    assert page.ask("document.title") == RICH.title
    assert page.events("Network.requestWillBeSent")[0]["request"]["url"] == rich.as_uri()
    assert page.ask("document.querySelector('#nasty h2').textContent") == NASTY
    assert page.ask("document.querySelector('#nasty tbody th').textContent") == NASTY
    assert visible(page, "img") == 0


HOSTILE = "x\"'</script></style></svg></title><img src=x onerror=owned=1><svg onload=owned=1>`${owned=1}`"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The pages of two runs whose sender wrote such texts wherever a run directory has texts, and sealed them."""
    folder = tmp_path_factory.mktemp("hostile")
    data = folder / f"{HOSTILE.replace('/', '')}.npz"
    labels = np.arange(60) % 3
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    names = {"classes": np.array([f"{label}{HOSTILE}" for label in range(3)])}
    users = {"users": np.array([f"{HOSTILE}{number % 4}" for number in range(60)])}
    np.savez(data, x_train=pixels, y_train=labels, x_test=pixels, y_test=labels, **names, **users)
    runs = [folder / f"{number}{HOSTILE.replace('/', '')}" for number in range(2)]
    for seed, run in enumerate(runs):
        unskew.run(out=run, data=f"arrays:{data}", partition="users", rounds=1, epochs=1, seed=seed, engine="loop",
                   method="fedavg + lda", during="norms + drift")  # fmt: skip
        unskew.analyse(run)
        result = json.loads((run / "result.json").read_text())
        result |= {"method": HOSTILE, "data": HOSTILE, "partition": HOSTILE, "model": HOSTILE, "notes": [HOSTILE]}
        result["settings"] |= {"method": HOSTILE, "lr": HOSTILE}
        (run / "result.json").write_text(json.dumps(result))
        (metrics,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        metrics |= {"notes": [HOSTILE], "failures": [{"client": 1, "reason": HOSTILE}]}
        (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
        for file in (run / "figures").glob("*.json"):
            values = json.loads(file.read_text())
            file.write_text(json.dumps(values | {"notes": [HOSTILE]}))
        seal_folder(run)
    alone, both = folder / "one.html", folder / "two.html"
    unskew.write_report(runs[0], out=alone)
    unskew.write_report(*runs, out=both)
    return {"one": alone, "two": both}


@pytest.mark.parametrize("which", ["one", "two"])
def test_a_run_from_somebody_hostile_is_shown_as_text(tab, hostile, which):
    tab.open(hostile[which])
    assert HOSTILE in tab.ask("document.body.textContent")
    for mark in range(tab.ask("document.querySelectorAll('.plot').length")):
        tab.ask(f"document.querySelectorAll('.plot')[{mark}].focus()")
        tab.press("End")
    for button in ("th button", ".download", "[data-step='1']"):
        tab.ask(f"document.querySelectorAll({json.dumps(button)}).forEach(each => each.click())")
    assert tab.ask("typeof owned") == "undefined"
    assert tab.ask("document.images.length") == 0
    attributes = "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes].map(a => a.name))"
    assert [name for name in tab.ask(attributes) if name.startswith("on")] == []
    links = tab.ask("[...document.querySelectorAll('a, [href]')].map(e => e.getAttribute('href') ?? '')")
    assert [link for link in links if not link.startswith(("#", "data:image/"))] == []


def test_a_script_that_is_not_the_page_s_own_does_not_run(tab, tmp_path, rich):
    """The second wall: even if a text came through as it is."""
    page = tmp_path / "page.html"
    text = rich.read_text(encoding="utf-8")
    page.write_text(text.replace("</h1>", "</h1><script>owned = 1</script><p onclick='owned = 1'>", 1), "utf-8")
    tab.open(page)
    tab.click("header p")
    assert tab.ask("typeof owned") == "undefined"
    assert any("Content Security Policy" in complaint for complaint in tab.complaints())
    tab.browser.events.clear()


def test_the_next_button_shows_the_next_of_a_choice_and_wraps(page):
    assert shown(page, FIRST) == ["Examples of client 2 by class"]
    for after in (3, 4, 5, 0):
        page.click(f'{FIRST} [data-step="1"]')
        assert shown(page, FIRST) == [f"Examples of client {after} by class"]
    page.click(f'{FIRST} [data-step="-1"]')
    assert shown(page, FIRST) == ["Examples of client 5 by class"]


@pytest.mark.parametrize("where", ["select", '[data-step="1"]'])
def test_arrow_keys_go_through_a_choice(page, where):
    focus(page, f"{FIRST} {where}")
    page.press("ArrowRight")
    assert shown(page, FIRST) == ["Examples of client 3 by class"]
    page.press("ArrowDown")
    assert page.ask(f"document.querySelector('{FIRST} select').value") == "client 4"
    page.press("ArrowLeft")
    page.press("ArrowUp")
    assert shown(page, FIRST) == ["Examples of client 2 by class"]


def test_choices_with_one_label_go_together_as_far_as_they_can(page):
    page.click(f'{FIRST} [data-step="1"]')
    assert shown(page, SECOND) == ["Accuracy of client 3"]
    page.click(f'{FIRST} [data-step="1"]')
    page.click(f'{FIRST} [data-step="1"]')
    assert shown(page, FIRST) == ["Examples of client 5 by class"]
    assert shown(page, SECOND) == ["Accuracy of client 4"], "it has no client 5"
    assert shown(page, "#clients .choice:nth-of-type(3)") == ["Drift of conv1"], "another label"


def test_a_click_on_a_head_sorts_numbers_as_numbers_and_a_second_turns_it(page):
    page.click('[aria-label="Clients"] th:nth-child(2) button')
    assert column(page, "Clients", 1) == ["9", "45", "120", "120", "1,100"]
    assert column(page, "Clients", 0) == ["client 2", "", "client 10", "client 7", "client 1"]
    heads = "[...document.querySelectorAll('[aria-label=\"Clients\"] thead th')].map(h => h.getAttribute('aria-sort'))"
    assert page.ask(heads) == [None, "ascending", None, None]
    page.click('[aria-label="Clients"] th:nth-child(2) button')
    assert column(page, "Clients", 0) == ["client 1", "client 10", "client 7", "", "client 2"], (
        "equals keep their order"
    )
    assert page.ask(heads) == [None, "descending", None, None]
    page.click('[aria-label="Clients"] th:nth-child(3) button')
    assert page.ask(heads) == [None, None, "ascending", None]


@pytest.mark.parametrize("key", ["Enter", " "])
def test_a_table_is_sorted_from_the_keyboard(page, key):
    focus(page, '[aria-label="Clients"] th:nth-child(3) button')
    page.press(key)
    assert column(page, "Clients", 2)[0] == "7.00 %"


def test_a_long_table_begins_folded_and_sorts_whole(page):
    rows = '[aria-label="Rounds"] tbody tr'
    assert visible(page, rows) == 100
    page.click('[aria-label="Rounds"] th:nth-child(2) button')
    assert column(page, "Rounds", 0)[0] == "349", "the lowest loss is in a row that was folded"
    assert visible(page, rows) == 100
    assert page.ask("document.querySelector('.unfold').textContent") == "Show all 350 rows"
    page.click(".unfold")
    assert visible(page, rows) == 350
    page.click(".unfold")
    assert visible(page, rows) == 100


def test_a_mark_says_what_it_is_under_the_mouse_and_only_once(page):
    assert tip(page) == ""
    page.move(*page.place('#clients .shown [data-tip="client 2, class 3: 14"]'))
    page.until("document.querySelector('.tip').textContent === 'client 2, class 3: 14'")
    assert tip(page)
    assert page.ask("document.querySelector('.marked > title')") is None, "or the browser would say it too"
    page.move(3, 450)
    page.until("document.querySelector('.tip').textContent === ''")
    assert tip(page) == ""


def test_a_tip_stays_on_the_screen(tab, rich):
    tab.screen(360, 740, phone=True)
    tab.open(rich)
    focus(tab, "#accuracy .plot")
    for key in ("Home", "End"):
        tab.press(key)
        box = tab.ask("document.querySelector('.tip').getBoundingClientRect().toJSON()")
        assert box["left"] >= 0
        assert box["right"] <= 360
        assert box["top"] >= 0


def test_arrow_keys_go_from_mark_to_mark(page):
    focus(page, "#accuracy .plot")
    keys = ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "End", "Home")
    for key, said in zip(keys, (1, 2, 1, 1, 40, 1), strict=True):
        page.press(key)
        assert tip(page).startswith(f"round {said}:")
    page.press("Escape")
    assert tip(page) == ""


def test_a_finger_near_a_mark_gets_its_tip_and_elsewhere_closes_it(tab, rich):
    tab.screen(390, 844, phone=True)
    tab.open(rich)
    x, y = tab.place('#accuracy [data-tip^="round 40:"]')
    tab.tap(x + 9, y - 9)
    tab.until("document.querySelector('.tip').textContent.startsWith('round 40:')")
    tab.tap(x, y + 90)
    tab.until("document.querySelector('.tip').textContent === ''")


def test_colours_follow_the_system_until_a_reader_chooses_and_are_remembered(tab, rich):
    tab.media(colours="dark")
    tab.open(rich)
    assert colours(tab) == NIGHT
    tab.click('.theme [value="light"]')
    assert colours(tab) == DAY
    tab.reload()
    assert colours(tab) == DAY
    assert tab.ask("document.querySelector('.theme :checked').value") == "light"
    tab.click('.theme [value="auto"]')
    assert colours(tab) == NIGHT
    tab.media(colours="light")
    assert colours(tab) == DAY
    tab.click('.theme [value="dark"]')
    assert colours(tab) == NIGHT


@pytest.mark.parametrize(("width", "height"), [(360, 740), (390, 844), (768, 1024), (1280, 900)])
def test_nothing_but_boxes_scrolls_sideways(tab, rich, width, height):
    tab.screen(width, height, phone=width < 500)
    tab.open(rich)
    assert tab.ask("innerWidth") == width
    assert tab.ask("document.scrollingElement.scrollWidth") <= width
    assert tab.ask("(b => b.scrollWidth > b.clientWidth)(document.querySelector('.box[aria-label=\"Runs\"]'))")


def test_figures_stand_in_one_column_on_a_phone_and_in_two_beside(tab, rich):
    figures = "[...document.querySelectorAll('#accuracy .elements > figure')]"
    tops = f"{figures}.map(figure => Math.round(figure.getBoundingClientRect().top))"
    tab.open(rich)
    first, second, third = tab.ask(tops)
    assert first == second < third
    tab.screen(390, 844, phone=True)
    first, second, third = tab.ask(tops)
    assert first < second < third
    assert tab.ask("(p => p.scrollWidth > p.clientWidth)(document.querySelector('#accuracy .wide .plot'))")


def test_the_first_column_and_the_head_stay_where_a_table_scrolls(tab, rich):
    tab.screen(390, 844, phone=True)
    tab.open(rich)
    place = "(e => { const b = e.getBoundingClientRect(); return [Math.round(b.left), Math.round(b.top)]; })"
    corner = f"{place}(document.querySelector('[aria-label=\"Runs\"] thead th'))"
    box = "document.querySelector('.box[aria-label=\"Runs\"]')"
    before = tab.ask(corner)
    tab.ask(f"{box}.scrollTo(300, 20)")
    assert tab.ask(f"[{box}.scrollLeft, {box}.scrollTop]") == [300, 20]
    assert tab.ask(corner) == before


def test_a_figure_can_be_kept_as_a_file_of_its_own(tab, rich, tmp_path):
    tab.browser.call(
        "Browser.setDownloadBehavior", behavior="allow", browserContextId=tab.context, downloadPath=str(tmp_path)
    )
    tab.open(rich)
    tab.move(*tab.place('#clients .shown [data-tip="client 2, class 3: 14"]'))
    tab.click("#clients .shown .download")
    kept = tmp_path / "classes-2.svg"
    tab.wait(lambda: kept.exists() and kept.read_text().endswith("</svg>"), "the file")
    tree = ElementTree.fromstring(kept.read_text())
    assert tree.tag == f"{SVG}svg"
    assert "svg.chart" in tree.find(f"{SVG}style").text
    marks = [mark for mark in tree.iter() if "data-tip" in mark.attrib]
    assert len(marks) == 10
    assert all(mark.find(f"{SVG}title").text == mark.get("data-tip") for mark in marks)
    assert "marked" not in kept.read_text()


def test_without_scripts_everything_is_there(tab, rich):
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    tab.open(rich)
    assert visible(tab, "figure") == tab.ask("document.querySelectorAll('figure').length") == 18
    assert visible(tab, ".which") == 13
    assert visible(tab, '[aria-label="Rounds"] tbody tr') == 350
    assert visible(tab, "button, select, .theme, .tip") == 0
    assert visible(tab, "nav a") == 7
    tab.screen(360, 740, phone=True)
    assert tab.ask("document.scrollingElement.scrollWidth") <= 360


def test_on_paper_everything_is_there_by_daylight(tab, rich):
    tab.media(colours="dark")
    tab.open(rich)
    tab.click('.theme [value="dark"]')
    tab.media("print", colours="dark")
    assert colours(tab) == DAY
    assert tab.ask("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert visible(tab, "figure") == 18
    assert visible(tab, '[aria-label="Rounds"] tbody tr') == 350
    assert visible(tab, "nav, .chooser, .theme, .download, .unfold, .tip") == 0
    printed = base64.b64decode(tab.call("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF")


def test_every_control_has_a_name_and_headings_go_down_by_one(tab, rich):
    tab.call("Accessibility.enable")
    tab.open(rich)
    nodes = [node for node in tab.call("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]
    roles = ("button", "combobox", "radio", "link", "image", "region", "navigation", "table", "graphics-document")
    named = [node for node in nodes if node["role"]["value"] in roles]
    assert len(named) > 50
    names = [node["name"].get("value", "") for node in named]
    assert all(any(letter.isalnum() for letter in name) for name in names), "a sign is no name"
    assert {"Previous client", "Next client", "Download “Confusion” as SVG", "Sections", "Runs"} <= set(names)
    assert {"main", "banner", "contentinfo"} <= {node["role"]["value"] for node in nodes}
    levels = tab.ask("[...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert levels.count(1) == 1


def test_a_page_without_anything_opens(tab, tmp_path):
    path = tmp_path / "empty.html"
    path.write_text(to_html(Page(title="", subtitle="", findings=[], facts=[], sections=[])))
    tab.open(path)
    assert visible(tab, "main") == 1
