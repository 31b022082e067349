"""dcpctl's manual page, --help and completions name every command and option of the tables (api/cli/main.c, worker/spec/*.def), and no
others."""
import pathlib
import re
import subprocess

import dcpd as lib
import spec_rows

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "deploy/dcpctl.1").read_text()


def test_commands_and_options():
    commands = spec_rows.commands()
    options = {*spec_rows.GLOBAL, *(o for some in commands.values() for o in some)}
    assert len(commands) > 20 and {"layout", "detach", "rename", "label", "overwrite", "yes", "slice"} <= options
    described = set(re.findall(r"^\.BR? (\w+)(?: \"|$)", PAGE.split(".SH OPTIONS")[0].split(".SH COMMANDS")[1], re.M))
    assert described == set(commands)
    named = set(re.findall(r"--([a-z-]+)", PAGE.split(".SH EXAMPLES")[0]))
    assert named == options, named ^ options


def test_what_is_made_of_the_rows():
    """The manual's options of job kinds and the shell's completions; `python3 tests/lib/spec_rows.py` writes both."""
    assert spec_rows.page(PAGE) == PAGE
    assert spec_rows.completion() == (ROOT / "deploy/dcpctl.bash-completion").read_text()


def test_help_of_every_kind():
    """dcpctl itself says what the rows say, without a daemon."""
    for name in set(spec_rows.KINDS) & set(spec_rows.commands()):
        text = subprocess.run([lib.BIN / "dcpctl", name, "--help"], capture_output=True, text=True, check=True).stdout
        for f in spec_rows.options(name):
            given = f.value or "|".join(f.words() or [])
            assert f"  --{f.option}{' ' if given else ''}{given}\n      {spec_rows.what(f)}\n" in text, (name, f.option)
        assert re.findall(r"^  --([a-z-]+)", text, re.M) == [f.option for f in spec_rows.options(name)]


def test_every_error_has_a_remedy():
    """api/errors.md names each code of the catalogue once, and no other."""
    codes = [c.lower() for c in re.findall(r"^X\((\w+),", (ROOT / "worker/base/err.def").read_text(), re.M)]
    rows = [line for line in (ROOT / "api/errors.md").read_text().splitlines() if line.startswith("| `")]
    named = [c for line in rows for c in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(codes), set(named) ^ set(codes)
    assert all(len(cell.strip()) > 8 for line in rows for cell in line.split("|")[2:4])


def test_licences_of_all_that_is_linked():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    packages = re.search(r"^PKGS := (.*)$", makefile, re.M)[1].split()
    page = (ROOT / "LICENCES.md").read_text()
    assert [p for p in packages if not re.search(rf"\| (?:[\w-]+, )?{re.escape(p)}(?:, [\w-]+)? \|", page)] == []
