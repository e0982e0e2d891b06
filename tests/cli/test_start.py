"""What the command line imports before a command needs it."""

import ast
import subprocess
import sys

from click import Context

from refattn.cli.group import COMMANDS, group
from refattn.judge.rounding.hardware import UNITS
from refattn.judge.rounding.profiles import PROFILES
from tests.cli.running import run

FIRST = [
    *("--help", "--version", "nonsense", "compare --help", "compare --featurs 8", "check --help"),
    *("check --nothing x:y", "compare --draws 0", "vectors", "vectors --help"),
    *("verify --help", "tolerance --help", "verify", "tolerance --alpha 1", "explain --help"),
]
RUN = f"""
import sys
from refattn.cli.process import commands

for words in {FIRST}:
    try:
        commands()(words.split(), "refattn")
    except SystemExit as end:
        modules = sorted({{x.partition(".")[0] for x in sys.modules}})
        print([words, end.code, modules], file=sys.stderr)
"""


def test_help_and_usage_errors_import_no_arrays():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    lines = [ast.literal_eval(x) for x in done.stderr.splitlines() if x.startswith("[")]
    assert [words for words, _, _ in lines] == FIRST
    for words, status, modules in lines:
        assert status == (0 if words.startswith("--") or words.endswith("--help") else 2), words
        assert {"refattn", "click"} <= {*modules}
        assert not {"numpy", "scipy", "array_api_compat", "matplotlib"} & {*modules}, words


def test_help_names_hardware_and_profiles():
    for command in ("verify", "tolerance"):
        text = " ".join(run(command, "--help").stdout.split())
        shown = text.partition("matrix units truncate sums of products: ")[2].partition(" if sums")[
            0
        ]
        assert set(shown.replace(";", ",").split(", ")) == {*UNITS, "ieee"}
        shown = text.partition("What the kernel rounds: ")[2].partition(", ...")[0]
        assert set(shown.split(", ")) < set(PROFILES)


def test_a_mistyped_command_gets_a_suggestion():
    done = run("chek", "x:y")
    assert done.exit_code == 2
    assert "No such command 'chek'. Did you mean check?" in done.stderr


def test_every_command_is_in_the_help():
    context = Context(group)
    assert group.list_commands(context) == sorted(COMMANDS)
    assert all(group.get_command(context, name).name == name for name in COMMANDS)
    assert all(f"\n  {name} " in group.get_help(context) for name in COMMANDS)
