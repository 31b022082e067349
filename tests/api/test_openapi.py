"""The contract says what the code does: paths and methods are those of the route table, codes those of the catalogue, kinds those
of the job specs. Mostly read as text, and without a daemon."""
import pathlib
import re

import pytest
import spec_rows
import yaml
from spec_rows import KINDS

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
    # What webhooks, chains and policies do the same way has a handler for the three.
    handlers = {(h, path.split("/")[2]) if h.startswith("h_follower") else h for _, path, h in table}
    assert len(table) > 25 and len(handlers) >= len(table) - 1, "one handler a route"
    assert {(m, p) for m, p, _ in table} == contract()


def test_every_operation_has_examples():
    """Of each body that is asked for, and of each answer in JSON."""
    for path, methods in yaml.load(YAML, yaml.CSafeLoader)["paths"].items():
        for method, op in methods.items():
            if method == "parameters":
                continue
            bodies = [r.get("content", {}) for status, r in op["responses"].items() if status.startswith("2")]
            if op.get("requestBody", {}).get("required"):
                bodies.append(op["requestBody"]["content"])
            for body in bodies:
                shown = body.get("application/json", {"example": None})
                assert "example" in shown or "examples" in shown, (method, path)


def members(spec, schema, value, at):
    """Paths of the members of `value` that its schema does not name, where it names any."""
    while "$ref" in schema:
        found = spec
        for key in schema["$ref"].split("/")[1:]:
            found = found[key]
        schema = found
    if isinstance(value, list):
        return [x for v in value for x in members(spec, schema.get("items", {}), v, f"{at}[]")]
    if not isinstance(value, dict) or "properties" not in schema or isinstance(schema.get("additionalProperties"), dict):
        return []
    named = schema["properties"]
    return [x for k, v in value.items() for x in (members(spec, named[k], v, f"{at}.{k}") if k in named else [f"{at}.{k}"])]


def test_examples_have_no_members_that_are_not_described():
    """What a daemon answers is in the schemas, so that generated clients know it; results and plans differ by kind, and are in words."""
    spec, unknown = yaml.load(YAML, yaml.CSafeLoader), []
    for path, methods in spec["paths"].items():
        for method, op in methods.items():
            for r in op["responses"].values() if method != "parameters" else []:
                shown = r.get("content", {}).get("application/json", {})
                if "example" in shown:
                    unknown += members(spec, shown["schema"], shown["example"], f"{method} {path}")
    planned = {f"post /v1/jobs.{x}" for x in ("divergent", "generation", "plan_reused")}
    assert [x for x in unknown if ".result." not in x and x not in planned] == []


def test_codes():
    codes = re.findall(r"^X\((\w+),", (ROOT / "worker/base/err.def").read_text(), re.M)
    block = re.search(r"\n    Code:\n.*?enum: \[([^\]]*)\]", YAML, re.S)[1]
    assert re.findall(r"\w+", block) == [c.lower() for c in codes]
    for used in re.findall(r"x-problems: \[([^\]]*)\]", YAML):
        assert set(re.findall(r"\w+", used)) <= {c.lower() for c in codes}, used


def test_kinds():
    """The rows have the journal's numbers, in order, and the contract has their names wherever it lists kinds."""
    names = list(KINDS)
    assert [k.number for k in KINDS.values()] == list(range(len(names))) and len(names) >= 14
    assert re.findall(r"kind: \{const: (\w+)\}", YAML) == names
    assert re.findall(r"\w+", re.search(r"kind: \{type: string, enum: \[([^\]]*)\]", YAML)[1]) == names
    assert re.search(r"kind=\(([\w|]+)\)", YAML)[1].split("|") == names


def test_references_resolve():
    for kind, name in set(re.findall(r"#/components/(\w+)/(\w+)'", YAML)):
        section = re.search(rf"\n  {kind}:\n(.*?)(?=\n  \w|\Z)", YAML.split("\ncomponents:\n")[1].join(["\n", ""]), re.S)
        assert section and re.search(rf"^    {name}:", section[1], re.M), (kind, name)


def schema(text):
    """Follows $ref: '#/components/schemas/NAME'."""
    m = re.search(r"\$ref: '#/components/schemas/(\w+)'", text.split("\n")[0])
    return schema(re.search(rf"\n    {m[1]}:(.*?)(?=\n    \w|\Z)", YAML, re.S)[1].lstrip(" ")) if m else text


def properties(text):
    """Key → text of an object's properties, written as a block."""
    m = re.search(r"^( *)properties:\n(.*?)(?=^\1?\w|\Z)", text, re.S | re.M)
    indent = len(m[1]) + 2
    body = re.match(rf"((?: {{{indent},}}.*\n?|\n)*)", m[2])[1]
    parts = re.split(rf"^ {{{indent}}}(\w+):", body, flags=re.M)[1:]
    return {k: v.lstrip(" ") if v.strip().startswith("{") else v for k, v in zip(parts[::2], parts[1::2])}


def check_value(kind, f, text):
    """One field's schema says what its row says."""
    if f.words():
        listed = re.search(r"enum: \[([\w, ]+)\]", text)
        assert re.findall(r"\w+", listed[1]) == f.words() if listed else (kind, f.key) == ("save", "format"), (kind, f.key)
    if f.type == "BOOL":
        assert "type: boolean" in text, (kind, f.key)
    m = re.match(r"INTEGER\((\w+), (.+)\)", f.type)
    if m:
        limits = [re.search(rf"{end}: (\d+)", text)[1] for end in ("minimum", "maximum")]
        low, high = (str(eval(x, {"SPEC_WORLD_MAX": 65536, "INT64_MAX": 2**63 - 1})) for x in m.groups())
        assert limits == [low, high], (kind, f.key, limits)
    default = re.search(r"default: ([\w.]+)", text)
    if f.fallback and f.fallback not in ("[]", "{}"):
        assert default and default[1] in (f.fallback.strip('"'), f.fallback.removesuffix(".0")), (kind, f.key, f.fallback)


REF_KEYS = {"REF_CHECKPOINT": {"storage", "name"}, "REF_STATE_DICT": {"state_dict"}}


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_requests(kind):
    """The rows of fields.def are in the contract, with their types, words, limits and defaults, and the contract has no others."""
    spec = properties(re.search(rf"\n    {kind.capitalize()}Spec:\n(.*?)(?=\n    \w)", YAML, re.S)[1])
    refs = KINDS[kind].refs()
    places = {f.place for f in spec_rows.of(kind)} - {""} | set(refs) | {"options"}
    assert set(spec) == {"kind"} | places | {f.key for f in spec_rows.of(kind, "")}
    for place in places | {""}:
        inside = spec
        if place and "|" not in refs.get(place, ""):
            inside = properties(schema(spec[place]))
            assert set(inside) == {f.key for f in spec_rows.of(kind, place)} | REF_KEYS.get(refs.get(place), set()), (kind, place)
        elif place and "|" in refs.get(place, ""):
            assert all(re.search(rf"\b{f.key}: ", spec[place]) for f in spec_rows.of(kind, place)), (kind, place)
            continue
        for f in spec_rows.of(kind, place):
            check_value(kind, f, schema(inside[f.key]))


# A job's fields that the package names otherwise or makes itself, and arguments that are none of a job's.
PYTHON_NAMES = {"on_divergence", "files_per_rank", "overwrite", "format", "pace", "cache", "incremental", "parent",
                "labels", "metrics", "hold", "neighbours", "strict", "verify", "transform", "vars"}
NOT_IN_PYTHON = {
    "save": {"include", "exclude", "rename", "dtype", "dedup", "flatten_state_dict", "retries", "beside", "in_place", "sync_files", "hosts",
             "parts", "await_seal", "ring", "timeout_s", "generation", "alias"},
    "load": {"include", "exclude", "rename", "dtype", "delta", "retries", "pace", "cache", "labels", "world_size", "layout",
             "lease_seconds", "create_only", "key", "model", "replica", "nodes", "id", "timeout_s"},
}
PYTHON_ONLY = {
    "save": {"state_dict", "checkpoint", "process_group", "no_dist", "step", "slots", "when_busy", "progress", "timeout", "client",
             "at_exit", "overlap", "keep"},
    "load": {"checkpoint", "into", "keys", "device", "weights_only", "process_group", "no_dist", "progress", "timeout", "client",
             "spread"},
}


@pytest.mark.parametrize("name,kind", [("save", "save"), ("async_save", "save"), ("load", "load")])
def test_keywords_of_the_package(name, kind):
    """Every field of a save and a load is a keyword of the package, or named here as none; and the other way round."""
    source = (ROOT / f"api/python/dcpd/_{kind}.py").read_text()
    signature = re.search(rf"^def {name}\((.*?)\) ->", source, re.S | re.M)[1]
    depths, plain = 0, ""
    for c in signature:
        depths += (c == "[") - (c == "]")
        plain += c if depths == 0 and c != "]" else ""
    given = {m[0]: m[1].strip() for m in re.findall(r"(\w+):[^=,]*(?:=([^,]*))?", plain)}
    rows = {f.key: f for f in spec_rows.of(kind)}
    assert set(given) <= PYTHON_ONLY[kind] | PYTHON_NAMES
    assert set(given) - PYTHON_ONLY[kind] == set(rows) - NOT_IN_PYTHON[kind]
    assert NOT_IN_PYTHON[kind] <= set(rows)
    for key, default in given.items():
        if key in rows and default not in ("None", "") and key != "verify":
            assert default.lower() == (rows[key].fallback or "null"), (name, key)
