"""The report page as text: what is in it, that nothing from outside gets out of its place, that it needs nothing."""

import base64
import hashlib
import math
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from colours import contrast, linear
from unskew.analysis.measure import Choice, Column, Linked, Table
from unskew.charts import Axis, Chart, Line
from unskew.report.page import MAX_OPEN_ROWS, Page, Section, format_value, to_html

VOID = {"meta", "link", "br", "input", "img"}
NASTY = "</script></style></svg></select></table>\"'<img src=x onerror=alert(1)>&lt;<!-- שלום 🦊 \u202e"
LONG = 200 * "x"


class Reader(HTMLParser):
    """The elements of a page with their attributes and texts; every one has to be closed in its turn."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_startendtag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        for element in self._open:
            element[2] += data

    def all(self, tag, **wanted):
        return [e for e in self.elements if e[0] == tag and all(e[1].get(k) == v for k, v in wanted.items())]

    def looks(self, name):
        return [look for e in self.elements if name in (look := e[1].get("class", "")).split()]

    def texts(self, tag):
        return [text for _, _, text in self.all(tag)]


def chart(name="curve", title="A curve", alt="It rises", width=440):
    return Chart(name, title, alt, [Line([0, 1], [0, 1], name="line", points=True, tips=["low", "high"])], width=width)


def table(rows, *kinds, title="A table"):
    return Table(title, [Column(f"column {place}", kind) for place, kind in enumerate(kinds)], rows)


def one(*parts, **about):
    return Page("A title", "A subtitle", [], [], [Section("part", "A part", elements=parts, **about)])


CLIENTS = Choice("client", {"0": chart("c", "Zero"), "1": chart("c", "One", "1")}, start="1")

FULL = Page(
    title="A title",
    subtitle="A subtitle",
    findings=["It learns.", "It forgets."],
    facts=[("Method", "fedavg"), ("Rounds", "40")],
    sections=[
        Section("first", "The first", "Read it so.\n\nOr so.", [chart(), chart("wide", "Wide", "Far", 900)],
                findings=["It is so."], missing=["a: b"]),
        Section("second", "The second", elements=[CLIENTS]),
        Section("third", "The third", elements=[table([["a", 0.6279]], "text", "percent")]),
    ],
    footer="The end",
)  # fmt: skip


def test_a_page_is_well_formed_and_has_its_landmarks_findings_facts_and_what_is_missing():
    read = Reader(to_html(FULL))
    assert to_html(FULL).startswith("<!doctype html>\n")
    assert read.all("html")[0][1] == {"lang": "en"}
    assert [len(read.all(tag)) for tag in ("header", "nav", "main", "footer", "h1")] == [1, 1, 1, 1, 1]
    assert read.texts("title")[0] == read.texts("h1")[0] == "A title"
    assert read.texts("h2") == ["What this run shows", "The first", "The second", "The third"]
    assert read.texts("h3") == ["A curve", "Wide", "Zero", "One", "A table"]
    assert read.texts("p")[:3] == ["A subtitle", "Read it so.", "Or so."]
    assert [e[2].strip().split("\n") for e in read.all("ul", **{"class": "findings"})] == [list(FULL.findings)]
    assert list(zip(read.texts("dt"), read.texts("dd"), strict=True)) == list(FULL.facts)
    assert read.texts("li")[-2:] == ["It is so.", "Not shown: a: b"]
    assert read.all("footer")[0][2] == "The end"


def test_every_link_ends_at_a_place_of_the_page_and_no_place_is_there_twice():
    sections = [Section(name, name) for name in ("a b", "a-b", "findings", "content", "", "ü", '"><b>', "a-b-title")]
    read = Reader(to_html(replace(FULL, sections=[*FULL.sections, *sections])))
    places = Counter(e[1]["id"] for e in read.elements if "id" in e[1])
    assert set(places.values()) == {1}
    links = [e[1]["href"] for e in read.all("a")]
    assert len(links) == 1 + 1 + 3 + 8, "the skip link, the findings, the sections"
    assert {link[1:] for link in links} <= set(places)
    described = {e[1]["aria-labelledby"] for e in read.elements if "aria-labelledby" in e[1]}
    assert described <= set(places)


def test_charts_of_one_name_do_not_share_an_id():
    cut = replace(chart(), y=Axis(high=0.5))
    read = Reader(to_html(one(*(Choice("client", {"0": cut, "1": cut}) for _ in range(2)), cut)))
    clips = [e[1]["id"] for e in read.elements if e[0] == "clippath"]
    assert len(clips) == len(set(clips)) == 5


def test_nothing_is_asked_of_the_outside():
    text = to_html(FULL)
    read = Reader(text)
    addresses = [e[1][key] for e in read.elements for key in ("src", "href", "srcset", "action", "data") if key in e[1]]
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert all(inside.startswith("#") for inside in re.findall(r"url\(\s*['\"]?([^)]*)", text))
    assert "@import" not in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts)\b", text)
    # the one address left is the name of SVG, in the icon
    assert set(re.findall(r"https?://[^'\" ]+", text)) == {"http://www.w3.org/2000/svg"}
    (policy,) = read.all("meta", **{"http-equiv": "Content-Security-Policy"})
    (script,) = read.texts("script")
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy[1]["content"] == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def test_every_chart_has_its_alternative_text_and_title_and_a_choice_begins_where_it_says():
    read = Reader(to_html(FULL))
    drawn = read.all("svg")
    assert {e[1]["role"] for e in drawn} == {"img"}
    assert [e[1]["aria-label"] for e in drawn] == ["It rises", "Far", "It rises", "1"]
    assert len(read.all("figure")) == len(read.all("figcaption")) == 4
    assert [e[1]["data-name"] for e in read.all("figure")] == ["curve", "wide", "c", "c"]
    assert [(text, "selected" in about) for _, about, text in read.all("option")] == [("0", False), ("1", True)]
    assert read.looks("option") == ["option", "option shown"]
    first = Reader(to_html(one(Choice("client", {"0": chart(), "1": chart()}))))
    assert ["selected" in e[1] for e in first.all("option")] == [True, False]


def everywhere(words):
    """A page with these words in every place that takes some."""
    choice = Choice(words, {words: chart(words, words, words)})
    full = Table(words, [Column(words), Column(words, "number")], [[words, words]], words)
    section = Section(words, words, words, [choice, full], [words], [words])
    return Page(words, words, [words], [(words, words)], [section], words)


@pytest.mark.parametrize("words", [NASTY, LONG], ids=["nasty", "long"])
def test_text_from_outside_stays_text_wherever_it_stands(words):
    text = to_html(everywhere(words))
    read, plain = Reader(text), Reader(to_html(everywhere("a")))
    assert [e[0] for e in read.elements] == [e[0] for e in plain.elements], "no element more, none less"
    assert [set(e[1]) - {"class"} for e in read.elements] == [set(e[1]) - {"class"} for e in plain.elements]
    for tag in ("title", "h1", "h2", "h3", "dt", "dd", "option", "td"):
        assert words in read.texts(tag)
    assert read.all("svg")[0][1]["aria-label"] == words
    assert read.all("div", **{"data-label": words})
    assert text.count("</script>") == 1


def test_what_cannot_be_shown_is_replaced_and_the_page_can_be_written():
    read = Reader(to_html(replace(FULL, title="a\x00b\x1b[31mc\udcff", sections=[])))
    assert read.texts("h1") == ["a\ufffdb\ufffd[31mc?"]


def test_a_table_says_numbers_for_people_and_holds_them_for_sorting():
    rows = [["a", 0.6279, 1_540_000, 90, 12345, 0.30406], ["b", None, None, None, None, None], ["", "n/a", 0, 0, 0, 0]]
    read = Reader(to_html(one(table(rows, "text", "percent", "bytes", "seconds", "count", "number"))))
    texts = "62.79 %|1.5 MB|1 min 30 s|12,345|0.3041||||||n/a|0 B|0.0 s|0|0"
    assert read.texts("td") == texts.split("|")
    values = ["0.6279", "1540000", "90", "12345", "0.30406", *[None] * 6, "0", "0", "0", "0"]
    assert [e[1].get("data-value") for e in read.all("td")] == values
    assert [e[2] for e in read.all("th", scope="row")] == ["a", "b", ""]
    assert len(read.all("th", scope="col")) == 6


def test_a_cell_may_lead_somewhere_and_be_coloured_and_is_sorted_by_its_value():
    good, bad = Linked("59.00 ± 1.00", "../runs/a b/report.html", "inside", 59.0), Linked(NASTY, f"javascript:{NASTY}")
    row = ["row", good, Linked("plain"), bad]
    read = Reader(to_html(one(table([row], "text", "number", "text", "text"))))
    first, second, _ = read.all("td")
    assert (first[1]["class"], first[1]["data-value"]) == ("number inside", "59.0")
    assert "data-value" not in second[1]
    links = [link[1]["href"] for link in read.all("a") if not link[1]["href"].startswith("#")]
    assert links[0] == "../runs/a%20b/report.html"
    assert links[1].startswith("javascript%3A")  # the name of a file, whatever it is called
    assert len(links) == 2


@pytest.mark.parametrize(
    ("kind", "texts"),
    {
        "percent": {1: "100.00 %", 0.12345: "12.35 %", math.nan: "NaN"},
        "bytes": {1000: "1.0 kB", 15.4e6: "15.4 MB", 2.5e9: "2.5 GB", math.inf: "∞"},
        "seconds": {0.0123: "12 ms", 12.345: "12.3 s", 90: "1 min 30 s", 3600: "1 h 00 min"},
        "number": {1234567: "1,234,567", 0.99: "0.9900", 1e-7: "1e-07"},
        "text": {1.5: "1.5"},
        "count": {-2.0: "-2"},
    }.items(),
)
def test_numbers_read_as_their_kind(kind, texts):
    assert {value: format_value(value, kind) for value in texts} == texts


def test_a_kind_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"Column\(kind='per cent'\): choose from text, number, count, percent"):
        to_html(one(table([[1]], "per cent")))


@pytest.mark.parametrize("rows", [0, MAX_OPEN_ROWS, MAX_OPEN_ROWS + 1, 5000])
def test_all_rows_are_in_the_file_and_only_long_tables_are_folded(rows):
    read = Reader(to_html(one(table([[f"row {at}", at] for at in range(rows)], "text", "count"))))
    assert len(read.all("tr")) == 1 + rows
    assert ("folded" in read.all("table")[0][1].get("class", "")) is (rows > MAX_OPEN_ROWS)


@pytest.mark.parametrize("night", [0, 1], ids=["by day", "by night"])
def test_every_text_has_the_contrast_that_wcag_asks_for(night):
    style = files("unskew.report").joinpath("page.css").read_text("utf-8")
    pairs = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\);", style)
    colours = {name: both[night] for name, *both in pairs}
    assert len(colours) == style.count("light-dark(#")
    for ground in ("paper", "card", "wash", "stripe"):
        for text in ("ink", "quiet", "accent"):
            assert contrast(linear(colours[text]), linear(colours[ground])) >= 4.5, (text, ground)
    for ground in ("paper", "card"):
        assert contrast(linear(colours["edge"]), linear(colours[ground])) >= 3, "the edge of a control"
    beyond = style.replace("--paper: #fff;", "").split("--strip:", 1)[1]
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b|rgb|hsl", beyond), "every colour stands in the list"
