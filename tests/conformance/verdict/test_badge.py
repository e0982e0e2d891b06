"""The verdict as a small image."""

import re
from xml.etree import ElementTree

import pytest

import refattn
from refattn.conformance import Report, Result
from refattn.conformance.verdict.report import FAIL, PASS, UNDERPOWERED

SVG = "{http://www.w3.org/2000/svg}"
NAME = "<script>\"'&\x1b\udcff"


def badge(*statuses, **more):
    pytest.importorskip("jinja2")
    results = [Result(f"check {i}", "", "identity", status) for i, status in enumerate(statuses)]
    found = Report(NAME, "rfa", (), {}, "quick", 1e-6, 0, results, **more)
    return ElementTree.fromstring(found.to_badge().encode())


def words(image):
    return [x.text for x in image.iter(f"{SVG}text")]


def luminance(colour):
    """Relative, as WCAG 2 defines it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return float(sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))


LABEL = f"refattn {refattn.__version__} | rfa | quick"


def test_it_says_verdict_estimator_level_and_version():
    colours = set()
    for verdict in (PASS, FAIL, UNDERPOWERED):
        image = badge(PASS, verdict)
        assert words(image) == [LABEL, verdict]
        fills = [x.attrib["fill"] for x in image.iter(f"{SVG}rect") if "fill" in x.attrib]
        colours.add(fills[1])
        for fill in fills:  # under white letters
            assert 1.05 / (luminance(fill) + 0.05) >= 4.5
        for x in image.iter(f"{SVG}text"):  # letters are inside
            end = float(x.attrib["x"]) + float(x.attrib["textLength"])
            assert 0 < end < float(image.attrib["width"])
    assert len(colours) == 3
    assert words(badge())[1] == UNDERPOWERED  # nothing was checked


def test_part_of_the_checks_is_called_so():
    left = {"mask": "needs --capability mask", "causal": "not asked for", "lse": "time is over"}
    assert words(badge(PASS, not_tried=left)) == [f"{LABEL} | 1 of 3 checks", PASS]
    assert words(badge(PASS, not_tried={"mask": left["mask"]})) == [LABEL, PASS]


def test_readers_of_screens_say_the_title():
    image = badge(FAIL, limits={"head_sizes": "others", "max_logit": "larger"})
    title = image.find(f"{SVG}title")
    assert image.attrib["role"] == "img"
    assert image.attrib["aria-labelledby"] == title.attrib["id"]
    assert title.text == (
        "<script>\"'&\\x1b\\udcff as rfa: FAIL at level quick, alpha 1e-06, 1 checks, by refattn "
        f"{refattn.__version__}, under 2 declared limits"
    )


def test_it_needs_no_other_file():
    image = badge(PASS)
    text = ElementTree.tostring(image, encoding="unicode")
    assert set(re.findall(r"https?://[^\"']*", text)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"url\((.*?)\)", text) == ["#round"]
    tags = {x.tag.removeprefix(SVG) for x in image.iter()}
    assert tags == {"svg", "title", "clipPath", "rect", "g", "text"}
