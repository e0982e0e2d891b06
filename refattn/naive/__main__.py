"""``python -m refattn.naive`` prints the formulas as one file, for other projects to keep."""

from __future__ import annotations

import argparse
import sys

from .. import naive
from .one_file import formulas


def main() -> None:
    """Print all formulas, or those that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m refattn.naive",
        description="Print the formulas as one module, which needs NumPy 2 and nothing of refattn.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="one of " + ", ".join(naive.__all__)
    )
    given = parser.parse_args().names
    try:
        text = formulas(given)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
