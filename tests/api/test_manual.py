"""dcpctl's help, manual page and completions, and dcpd's manual pages: made of the rows of the tables, they name every command and option,
and no others."""
import pathlib
import re
import shutil
import subprocess

import dcpd as lib
import pytest
import spec_rows

ROOT = pathlib.Path(__file__).resolve().parents[2]
GLOBAL = ["json", "output", "columns", "url", "help", "timeout"]


def run(*words, program="dcpctl", **kw):
    return subprocess.run([lib.BIN / program, *map(str, words)], capture_output=True, text=True, timeout=30, **kw)


def said(*words, program="dcpctl", **kw):
    r = run(*words, program=program, **kw)
    assert r.returncode == 0, r.stderr
    return r.stdout


def test_manual_names_every_command_and_option():
    page = said("manual").replace("\\-", "-")
    commands = spec_rows.commands()
    options = {*GLOBAL, *(o for some in commands.values() for o in some)}
    assert len(commands) > 20 and {"layout", "detach", "rename", "label", "overwrite", "yes", "slice"} <= options
    part = page.split(".SH OPTIONS")[0].split(".SH COMMANDS")[1]
    assert re.findall(r"^\.TP\n\\fB([a-z]\w*)\\fR", part, re.M) == list(commands)
    assert set(re.findall(r"^\\fB--([a-z-]+)\\fR", page, re.M)) == options
    assert page.count("Print the plan") + page.count("print the plan") == 1


def test_help_of_every_command():
    """dcpctl itself says what the rows say, without a daemon: each option with its value and what it does."""
    for name, some in spec_rows.commands().items():
        text = said(name, "--help")
        assert re.findall(r"^  --([a-z-]+)", text, re.M) == [*some, *GLOBAL], name
        assert not re.search(r"^  --.*\n      $", text, re.M), "an option without a word"
        for f in spec_rows.options(name) if name in spec_rows.KINDS else []:
            given = f.value or "|".join(f.words() or [])
            assert f"  --{f.option}{' ' if given else ''}{given}\n      {spec_rows.what(f)}\n" in text, (name, f.option)


def test_manual_of_the_daemon():
    keys = re.findall(r"^  --([a-z0-9-]+)", said("--help", program="dcpd"), re.M)
    eighth, fifth = (said("--manual", n, program="dcpd").replace("\\-", "-") for n in (8, 5))
    assert re.findall(r"^\.TP\n\\fB--([a-z0-9-]+)\\fR", eighth, re.M) == keys
    of_file = re.findall(r"^\.TP\n\\fB([a-z0-9-]+)\\fR = ", fifth, re.M)
    assert of_file == [k for k in keys if k not in ("config", "check-config", "print-config", "doctor", "manual", "version", "help")]
    assert run("--manual", 3, program="dcpd").returncode == 2


def test_manual_pages_are_clean_roff():
    if not shutil.which("groff"):
        pytest.skip("no groff")
    for program, words in (("dcpctl", ["manual"]), ("dcpd", ["--manual", 8]), ("dcpd", ["--manual", 5])):
        r = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=said(*words, program=program), capture_output=True, text=True)
        assert (r.returncode, r.stderr) == (0, "")


def complete(line, d=None):
    env = lib.clean_environment(DCPD_URL=f"unix://{d.socket}" if d else "unix:///nowhere")
    out = said("__complete", line, env=env)
    return [x.split("\t")[0] for x in out.splitlines()]


def test_completions_are_the_rows():
    commands = spec_rows.commands()
    assert complete("dcpctl ") == list(commands)
    assert complete("dcpctl resh") == ["reshard"] and complete("dcpctl --json resh") == ["reshard"]
    for name, some in commands.items():
        assert complete(f"dcpctl {name} --") == [f"--{o}" for o in [*some, *GLOBAL]], name
    assert complete("dcpctl verify main:x --level d") == ["digest"]
    assert complete("dcpctl ls --output ") == ["table", "json", "ndjson", "csv"]
    assert complete("dcpctl completion f") == ["fish"]
    assert complete("dcpctl nonsense ") == [] and complete("dcpctl show main:") == []


def test_completions_know_names(d):
    sd, name = lib.fresh(), f"{lib.fresh()}/step-1"
    d.put(sd, [lib.image({"a": ("F32", [4], bytes(16))})])
    job = d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})["id"]
    assert "main:" in complete("dcpctl show ", d) and "shm:" in complete("dcpctl show ", d)
    assert complete(f"dcpctl show main:{name[:-2]}", d) == [f"main:{name}"]
    assert complete(f"dcpctl save shm:{sd[:-1]}", d) == [f"shm:{sd}"]
    assert complete(f"dcpctl runs main:{name.split('/')[0]}", d) == [f"main:{name.split('/')[0]}"]
    assert job in complete("dcpctl job ", d)
    d.drop(sd)


def test_completion_in_bash(d):
    """As bash asks for it: a reference has a colon, which divides words there."""
    name = f"{lib.fresh()}/step-1"
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("F32", [4], bytes(16))})])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    script = said("completion", "bash") + f"""
compopt() {{ :; }}
COMP_LINE='dcpctl show main:{name[:-3]}' COMP_POINT=${{#COMP_LINE}}
COMP_LINE='dcpctl show main:{name[:-3]}'; COMP_POINT=${{#COMP_LINE}}; _dcpctl; echo "${{COMPREPLY[@]}}"
COMP_LINE='dcpctl undel'; COMP_POINT=${{#COMP_LINE}}; _dcpctl; echo "${{COMPREPLY[@]}}"
"""
    env = lib.clean_environment(DCPD_URL=f"unix://{d.socket}")
    env["PATH"] = f"{lib.BIN}:{env['PATH']}"
    r = subprocess.run(["bash", "--norc"], input=script, capture_output=True, text=True, env=env)
    assert r.stdout.splitlines() == [name, "undelete"], (r.stdout, r.stderr)
    d.drop(sd)


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
