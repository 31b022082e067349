"""The contract says what the code does: paths and methods are those of the route table, codes those of the catalogue, kinds those
of the job specs. Read as text: neither YAML nor a daemon is needed."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
YAML = (ROOT / "api/openapi.yaml").read_text()


def contract():
    """{(method, path)}: paths stand at two spaces below `paths:`, methods at four."""
    found, path = set(), None
    for line in YAML.split("\npaths:\n")[1].split("\ncomponents:\n")[0].split("\n"):
        if m := re.match(r"  (/\S*):$", line):
            path = m[1]
        elif m := re.match(r"    (get|post|put|delete|patch|head):$", line):
            assert (m[1].upper(), path) not in found, line
            found.add((m[1].upper(), path))
    return found


def test_routes():
    table = re.findall(r'^\t\{ "([A-Z]+)", "([^"]+)", (h_\w+)', (ROOT / "api/routes.c").read_text(), re.M)
    assert len(table) > 25 and len({h for _, _, h in table}) >= len(table) - 1, "one handler a route"
    assert {(m, p) for m, p, _ in table} == contract()


def test_codes():
    codes = re.findall(r"^X\((\w+),", (ROOT / "worker/base/err.def").read_text(), re.M)
    block = re.search(r"\n    Code:\n.*?enum: \[([^\]]*)\]", YAML, re.S)[1]
    assert re.findall(r"\w+", block) == [c.lower() for c in codes]
    for used in re.findall(r"x-problems: \[([^\]]*)\]", YAML):
        assert set(re.findall(r"\w+", used)) <= {c.lower() for c in codes}, used


KINDS = re.findall(r"^KIND\(\w+, (\w+), (\d+),", (ROOT / "worker/spec/kinds.def").read_text(), re.M)


def test_kinds():
    """The rows have the journal's numbers, in order, and the contract has their names wherever it lists kinds."""
    assert [int(number) for _, number in KINDS] == list(range(len(KINDS))) and len(KINDS) >= 14
    names = [name for name, _ in KINDS]
    assert re.findall(r"kind: \{const: (\w+)\}", YAML) == names
    assert re.findall(r"\w+", re.search(r"kind: \{type: string, enum: \[([^\]]*)\]", YAML)[1]) == names
    assert re.search(r"kind=\(([\w|]+)\)", YAML)[1].split("|") == names


def test_references_resolve():
    for kind, name in set(re.findall(r"#/components/(\w+)/(\w+)'", YAML)):
        section = re.search(rf"\n  {kind}:\n(.*?)(?=\n  \w|\Z)", YAML.split("\ncomponents:\n")[1].join(["\n", ""]), re.S)
        assert section and re.search(rf"^    {name}:", section[1], re.M), (kind, name)


def test_fields_of_requests():
    """The fields that spec*.c know at the top of a job are in the contract, and the other way round."""
    code = (ROOT / "worker/spec/spec.c").read_text() + (ROOT / "worker/spec/spec_sdops.c").read_text()
    macros = dict(re.findall(r"#define (\w+) (.*)", code))
    kinds = re.findall(r"kind: \{const: (\w+)\}", YAML)
    for kind in kinds:
        body = re.search(rf"check_{kind}\(.*?\n\}}\n", code, re.S)[0]
        listed = re.search(r"jval_only\(doc, .*?\}\)\)", body, re.S)[0]
        for _ in macros:
            listed = re.sub(r"\b[A-Z_]+KINDS\b", lambda m: macros[m[0]], listed)
        known = set(re.findall(r'"(\w+)"', listed))
        spec = re.search(rf"\n    {kind.capitalize()}Spec:\n.*?\n      properties:\n(.*?)(?=\n    \w)", YAML, re.S)[1]
        assert set(re.findall(r"^        (\w+):", spec, re.M)) == known, kind
