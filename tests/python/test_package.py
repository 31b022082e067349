"""The package as users get it: a wheel that needs nothing, types, and a manual that names what there is."""
import ast
import importlib.util
import os
import re
import subprocess
import sys
import zipfile

from conftest import PACKAGE

import dcpd


def backend():
    spec = importlib.util.spec_from_file_location("backend", PACKAGE / "backend.py")
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    return m


def test_wheel_works_by_itself(tmp_path, d):
    wheel = tmp_path / backend().build_wheel(str(tmp_path))
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        record = z.read(next(n for n in names if n.endswith("RECORD"))).decode()
        assert z.testzip() is None
    sources = {str(p.relative_to(PACKAGE)) for p in (PACKAGE / "dcpd").rglob("*.py") if "__pycache__" not in p.parts}
    assert sources <= names and "dcpd/py.typed" in names and all(n in record for n in names)
    code = "import dcpd; print(dcpd.__file__); dcpd.save({'x': 1}, 'main:wheel'); print(dcpd.open('main:wheel')['x'])"
    out = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path,
                         env={"PYTHONPATH": str(wheel), "DCPD_URL": f"unix://{d.socket}", "PATH": os.environ["PATH"]})
    assert out.returncode == 0 and str(wheel) in out.stdout and out.stdout.endswith("\n1\n"), out.stdout + out.stderr
    assert (tmp_path / backend().build_sdist(str(tmp_path))).stat().st_size > 10_000


def test_a_wheel_with_programs_makes_them_commands(tmp_path, monkeypatch):
    programs = {"dcpd": b"#!/bin/sh\n", "lib/libx.so.1": b"x"}
    name = backend().build_with_programs(str(tmp_path), programs, "manylinux_2_36_x86_64", {"licenses/x": "free"})
    assert name.endswith("-py3-none-manylinux_2_36_x86_64.whl")
    with zipfile.ZipFile(tmp_path / name) as z:
        modes = {i.filename: i.external_attr >> 16 for i in z.infolist()}
        notes = {n.partition(".dist-info/")[2]: z.read(n).decode() for n in modes if ".dist-info/" in n}
        z.extractall(tmp_path / "site")
    assert modes["dcpd/_bin/dcpd"] == 0o100755 and modes["dcpd/__init__.py"] == 0o100644
    assert "Root-Is-Purelib: false" in notes["WHEEL"] and notes["licenses/x"] == "free"
    assert "dcpctl = dcpd._programs:dcpctl" in notes["entry_points.txt"]
    package = tmp_path / "site/dcpd"
    (package / "_bin/dcpd").chmod(0o755)
    code = "from dcpd import _local, _programs; print(_local.find_program()); _programs.dcpctl()"
    out = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True,
                         env={"PYTHONPATH": str(package.parent), "PATH": "/bin"})
    assert out.stdout.strip() == str(package / "_bin/dcpd") and "no programs inside" in out.stderr, out


def test_versions_agree():
    text = (PACKAGE / "pyproject.toml").read_text()
    root = PACKAGE.parents[1]
    assert f'version = "{dcpd.__version__}"' in text and dcpd.__version__ == (root / "VERSION").read_text().strip()


def test_everything_public_is_documented_and_typed():
    for name in dcpd.__all__:
        thing = getattr(dcpd, name)
        assert name == "__version__" or thing.__doc__, name
    for file in (PACKAGE / "dcpd").glob("*.py"):
        tree = ast.parse(file.read_text())
        assert ast.get_docstring(tree), file
        for f in ast.walk(tree):
            if isinstance(f, ast.FunctionDef):
                bare = [a.arg for a in f.args.args + f.args.kwonlyargs if a.annotation is None and a.arg not in ("self", "cls")]
                assert not bare and f.returns is not None, f"{file.name}:{f.lineno} {f.name}: {bare}"


def test_manual_names_what_there_is():
    text = (PACKAGE / "README.md").read_text()
    for name in set(re.findall(r"dcpd\.([a-zA-Z_]+)\(", text)):
        assert hasattr(dcpd, name), name
    table = text[text.index("## Errors"):text.index('## "I use')]
    for name in re.findall(r"`([A-Z][A-Za-z]+)`", table):
        assert name in dcpd.__all__ or hasattr(__builtins__, name) or name in dir(__import__("builtins")) or name == "DcpdError", name
    for example in (PACKAGE / "examples").glob("*.py"):
        assert example.name in text or example.name in (PACKAGE / "examples" / "README.md").read_text(), example
