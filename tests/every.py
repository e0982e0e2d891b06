"""Several functions as one, for rows of bad arguments."""

import re

import pytest


def every(*functions):
    """A function that calls all of these, which must all raise the same error, and raises it.

    Messages may differ in whether a number may be None or has to be positive.
    """

    def call(*args, **options):
        errors = []
        for function in functions:
            with pytest.raises((TypeError, ValueError)) as raised:
                function(*args, **options)
            errors.append(raised.value)
        said = {(type(x), re.sub(" or None| positive", "", str(x))) for x in errors}
        assert len(said) == 1, said
        raise errors[0]

    return call
