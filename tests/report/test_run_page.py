"""One run as a page: every section it should have, or why not."""

import pytest

from analysis.finished import CALIBRATIONS, copied, finished, finished_run, result, run, runs_of, section
from unskew.analysis import MEASURES
from unskew.analysis.measure import Choice, Table
from unskew.report.page import to_html
from unskew.report.write import run_page, take_all

__all__ = ["finished", "run", "runs_of"]

CHEAP = ("skew", "curves", "cka", "norms", "drift", "separability", "confusion", "fairness")
DEAR = [name for name in MEASURES if name not in CHEAP]


def page_of(path, *, only=(), without=(), again=False):
    with finished_run(path) as opened:
        return run_page(opened, take_all(opened, only, without, again))


@pytest.fixture(scope="module")
def whole(finished, tmp_path_factory):
    return page_of(copied(finished, tmp_path_factory.mktemp("run_page")), without=DEAR)


def test_every_measure_has_a_section_and_the_run_its_facts(whole, finished):
    said = result(finished)
    assert [each.name for each in whole.sections] == [
        "skew", "curves", "cka", "norms", "drift", "separability", "projection", "confusion", "fairness",
        "inversion", "probabilities", "cost", "made",
    ]  # fmt: skip
    facts = dict(whole.facts)
    assert facts["accuracy"] == f"{said['accuracy']:.2%}"
    best = max(said["calibrations"], key=lambda row: row["accuracy"])
    assert facts[f"after {best['name']}"] == f"{best['accuracy']:.2%}"
    assert facts["EMD"] == f"{said['emd']:.2f}"
    assert said["weights_sha256"][:12] in whole.footer
    assert whole.title.startswith("fedavg on ")


def test_the_sentences_on_top_are_each_measure_s_first(whole):
    # results first; drift asks for no place
    names = ("curves", "confusion", "skew", "fairness", "cka", "norms", "separability")
    assert whole.findings == [section(whole, name).findings[0] for name in names]


def test_a_measure_left_out_says_how_to_take_it(whole):
    for name in DEAR:
        (said,) = section(whole, name).missing
        assert said.startswith("left out; to include it, first run: unskew analyse ")
        assert said.endswith(f" {name}")
        assert section(whole, name).elements == ()


def test_tables_hold_every_round_and_every_classifier(whole, finished):
    said = result(finished)
    (rounds,) = [part for part in section(whole, "curves").elements if isinstance(part, Table)]
    assert [row[0] for row in rounds.rows] == [1, 2, 3]
    assert rounds.rows[-1][1] == said["accuracy"]
    (classifiers,) = [part for part in section(whole, "confusion").elements if isinstance(part, Table)]
    assert [row[0] for row in classifiers.rows] == ["before", *CALIBRATIONS]
    for row, each in zip(classifiers.rows[1:], said["calibrations"], strict=True):
        assert row[1] == each["accuracy"]
        assert row[2] == pytest.approx(each["accuracy"] - said["accuracy"])
    (costs,) = section(whole, "cost").elements
    assert [row[1] for row in costs.rows] == [said["bytes_up"], *(each["bytes_up"] for each in said["calibrations"])]
    (settings,) = section(whole, "made").elements
    pairs = dict(map(tuple, settings.rows))
    assert pairs["rounds"] == "3"
    assert pairs["method"] == "fedavg"


def test_a_reader_chooses_the_layer_the_client_and_the_class(whole):
    def choices(name):
        return {part.label: part for part in section(whole, name).elements if isinstance(part, Choice)}

    layers = choices("cka")["layer"]
    assert list(layers.options) == ["conv1", "conv2", "fc1", "classifier"]
    assert layers.start == "classifier"
    assert list(choices("skew")["client"].options) == list("01234")
    assert len(choices("confusion")["class"].options) == 10
    assert set(choices("confusion")["classifier"].options) >= set(CALIBRATIONS)


def test_only_what_is_named_is_taken(run):
    made = page_of(run, only=("skew", "norms(local=false)"))
    assert [each.name for each in made.sections] == ["skew", "norms", "probabilities", "cost", "made"]
    assert sorted(file.stem for file in (run / "figures").iterdir()) == ["norms-local-false", "skew"]


@pytest.mark.parametrize("source", ["skew (clients=2)", " skew(clients=2)"])
def test_a_measure_with_knobs_is_found_however_it_is_spelt(run, source):
    made = page_of(run, only=(source,))
    assert [each.name for each in made.sections] == ["skew", "probabilities", "cost", "made"]


def test_a_run_without_its_data_set_shows_what_it_can_and_says_what_it_cannot(run):
    (run.parent / "digits.npz").unlink()
    made = page_of(run)
    for name in ("skew", "curves", "norms", "drift", "separability"):
        assert section(made, name).elements, name
    for name in ("cka", "projection", "confusion", "inversion"):
        assert not section(made, name).elements
        assert "digits.npz does not exist" in section(made, name).missing[0]
    said = (*section(made, "norms").missing, *section(made, "norms").notes)
    assert any("norms of local classifiers are shown only as recorded" in words for words in said)
    assert to_html(made)


@pytest.mark.parametrize("options", [{"method": "centralised"}, {"clients": 1, "partition": "iid"}])
def test_runs_of_one_client_have_a_page(runs_of, tmp_path, options):
    made = page_of(copied(runs_of(**options), tmp_path), without=DEAR)
    assert "at least two clients" in section(made, "cka").missing[0]
    for name in ("skew", "curves", "norms", "drift", "separability", "confusion"):
        assert section(made, name).elements, name
    assert to_html(made)


@pytest.mark.heavy
def test_a_whole_page_with_everything(run):
    made = page_of(run)
    assert all(section(made, name).elements for name in MEASURES)
    assert len(made.findings) == sum(each.headline is not None for each in MEASURES.values())
    assert to_html(made)
