"""dcpctl's manual page and --help name every command and every option of the table in api/cli/main.c, and nothing else."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAIN = (ROOT / "api/cli/main.c").read_text()
PAGE = (ROOT / "deploy/dcpctl.1").read_text()


def table():
    macros = dict(re.findall(r'^#define (\w+) (.*)$', MAIN, re.M))
    rows = re.search(r"commands\[\] = \{(.*?)\n\};", MAIN, re.S)[1]

    def words(text):
        for name in re.findall(r"\b[A-Z]{4,}\b", re.sub(r'"[^"]*"', "", text)):
            text = text.replace(name, words(macros[name]))
        return text
    for row in re.findall(r'\{ "(\w+)", ("[^"]*"(?:\s*"[^"]*")*),\s*(.*?),\s*"', rows, re.S):
        yield row[0], set(re.findall(r"([a-z][a-z-]+)=?", " ".join(re.findall(r'"([^"]*)"', words(row[2])))))


def test_commands_and_options():
    commands, options = set(), {"json", "timeout", "url", "help"}
    for name, some in table():
        commands.add(name)
        options |= some
    assert len(commands) > 14 and {"layout", "detach", "rename", "label", "overwrite"} <= options
    described = set(re.findall(r"^\.BR? (\w+)(?: \"|$)", PAGE.split(".SH OPTIONS")[0].split(".SH COMMANDS")[1], re.M))
    assert described == commands
    named = set(re.findall(r"--([a-z-]+)", PAGE.split(".SH EXAMPLES")[0]))
    assert named == options, named ^ options


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
