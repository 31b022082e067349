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
