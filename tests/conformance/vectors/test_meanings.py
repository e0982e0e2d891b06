"""Ids of golden vectors and what they mean."""

import re

import numpy as np

from refattn.conformance.vectors import Convention, meanings


def test_ids_never_change_their_meaning(every):
    """A new id is added to ids.json; what is there stays, also of cases that are no more."""
    known = meanings.known()
    assert {case.id: meanings.meaning(case) for case in every}.items() <= known.items()
    assert len(set(known.values())) == len(known)
    assert all(re.fullmatch("[0-9a-f]{64}", x) for x in known.values())


def test_meanings_see_everything(every):
    (case,) = (c for c in every if c.id == "softmax-window-left1-right0-n6-m6-d4-dv3-float32")
    q = case.inputs["q"].copy()
    q[0, 0] = np.nextafter(q[0, 0], 9)
    others = [
        case._replace(inputs=case.inputs | {"q": q}),
        case._replace(inputs=case.inputs | {"q": case.inputs["q"].reshape(8, 3)}),
        case._replace(inputs=case.inputs | {"mask": np.ones(6, bool)}),
        case._replace(arguments=case.arguments | {"window": (1, 1)}),
        case._replace(convention=Convention("window", "inclusive, top-left")),
        case._replace(convention=Convention("window", "exclusive, top-left")),
    ]
    assert len({meanings.meaning(x) for x in (case, *others)}) == 1 + len(others)
    same = case._replace(comment="", flags=(), cond=0.0, group="")
    assert meanings.meaning(same) == meanings.meaning(case)
