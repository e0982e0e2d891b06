"""The page of all items of the five documents is that of its data, and what it names exists."""

import pytest

pytest.importorskip("matplotlib")

from validation import documents, sources, suite


def text(name):
    """A document of the project, in one line."""
    return " ".join((documents.PAGE.parents[1] / name).read_text("utf-8").split())


def test_the_page_is_up_to_date():
    """`python -m validation.documents` writes it. A name that does not exist is an error."""
    assert documents.PAGE.read_text("utf-8") == documents.page()


def test_only_training_and_open_questions_are_missing():
    every = documents.items()
    assert [*every] == [key for key in sources.SOURCES if key.isdigit()]
    missing = [x for rows in every.values() for x in rows if x.status == "missing"]
    assert all(x.note.startswith(("Training", "An open question")) for x in missing)


def test_every_claim_and_erratum_on_a_document_is_named():
    named = [x.here.split("; ") for rows in documents.items().values() for x in rows]
    named = {name for names in named for name in names}
    for claim in suite.claims().values():
        if claim.source.startswith("0"):
            assert any(x.startswith(f"{claim.name}: ") for x in named), claim.name
            for e in claim.errata:
                assert any(f"{claim.name}: {x}" in named for x in e.statements), e.title


def test_the_numbers_of_statements_in_texts():
    """In README.md, and where the results are."""
    every = [s for claim in suite.claims().values() for s in claim.statements.values()]
    printed = [s for s in every if s.printed]
    refuted = sum(s.expected == suite.REFUTED for s in printed)
    holds = sum(s.expected == suite.HOLDS for s in every)
    controls = len(every) - holds - refuted
    assert f": {refuted} of {len(printed)} statements" in text("README.md")
    assert (
        f"{holds} of the {len(every)} statements hold, {refuted} are refuted as printed, and "
        f"{controls} controls (mistakes made on purpose) are refuted. The sources print "
        f"{len(printed)} of the {len(every)}."
    ) in text("validation/site/guide/verdicts.md")


@pytest.mark.parametrize(
    ("here", "status", "note", "error"),
    [
        ("no_such_function", "works", "", AttributeError),
        ("no_such_claim: figure", "works", "", KeyError),
        ("theorem_1: no such statement", "works", "", KeyError),
        ("theorem_1: Bochner", "wrong", "", ValueError),
        ("softmax_attention", "works", "unsaid", ValueError),
        ("softmax_attention", "partly", "", ValueError),
    ],
)
def test_items_that_are_refused(here, status, note, error):
    with pytest.raises(error):
        documents.Item("where", "says", here, status, note).row()
