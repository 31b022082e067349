"""Builds the wheel. Python files and a text or two need no build tool: with a backend of our own `pip install ./api/python` works on
a machine without network and without setuptools. That wheel is Python alone; deploy/wheel.py adds the programs to it."""
import base64
import hashlib
import io
import os
import pathlib
import re
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
NAME = "dcpd"
EPOCH = (1980, 1, 1, 0, 0, 0)


def _version():
    return re.search(r'^version = "([^"]+)"', (HERE / "pyproject.toml").read_text(), re.M).group(1)


def _metadata():
    readme = (HERE / "README.md").read_text()
    return (f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {_version()}\n"
            "Summary: Client of dcpd, the Distributed CheckPoint Daemon\nRequires-Python: >=3.9\nProvides-Extra: torch\n"
            'Requires-Dist: torch>=2.3; extra == "torch"\nProvides-Extra: numpy\nRequires-Dist: numpy; extra == "numpy"\n'
            f"Description-Content-Type: text/markdown\n\n{readme}")


def _files():
    return sorted(p for p in (HERE / NAME).rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.suffix in (".py", ".typed"))


def _wheel(directory, files, platform="any", commands=(), notes=None):
    """Writes files (path → text or bytes; those in a folder _bin are executable) as a wheel, with notes in its .dist-info."""
    tag = f"{NAME}-{_version()}"
    info = f"{tag}.dist-info"
    scripts = "".join(f"{c}\n" for c in ("[console_scripts]", "dcpd-doctor = dcpd.doctor:main", *commands))
    pure = "true" if platform == "any" else "false"
    files = {**files, f"{info}/METADATA": _metadata(),
             f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: dcpd\nRoot-Is-Purelib: {pure}\nTag: py3-none-{platform}\n",
             f"{info}/entry_points.txt": scripts, **{f"{info}/{k}": v for k, v in (notes or {}).items()}}
    record = []
    name = f"{tag}-py3-none-{platform}.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w", zipfile.ZIP_DEFLATED) as z:
        for path, data in files.items():
            data = data.encode() if isinstance(data, str) else data
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}")
            _put(z, path, data)
        _put(z, f"{info}/RECORD", ("\n".join([*record, f"{info}/RECORD,,"]) + "\n").encode())
    return name


def _put(z, path, data):
    i = zipfile.ZipInfo(path, EPOCH)
    i.external_attr, i.compress_type = (0o100755 if "_bin" in path.split("/") else 0o100644) << 16, zipfile.ZIP_DEFLATED
    z.writestr(i, data)


def python_files():
    return {str(p.relative_to(HERE)): p.read_bytes() for p in _files()}


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return _wheel(wheel_directory, python_files())


def build_with_programs(directory, programs, platform, notes):
    """The wheel for one platform: programs (name → bytes, lib/NAME for their libraries) are commands where it is installed."""
    commands = [f"{c} = dcpd._programs:{c}" for c in ("dcpd", "dcpctl")]
    return _wheel(directory, {**python_files(), **{f"{NAME}/_bin/{k}": v for k, v in programs.items()}}, platform, commands, notes)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _wheel(wheel_directory, {f"{NAME}.pth": str(HERE) + "\n"})


def build_sdist(sdist_directory, config_settings=None):
    tag = f"{NAME}-{_version()}"
    files = {"PKG-INFO": _metadata().encode(), **{str(p.relative_to(HERE)): p.read_bytes() for p in [
        *_files(), HERE / "pyproject.toml", HERE / "README.md", HERE / "backend.py"]}}
    with tarfile.open(os.path.join(sdist_directory, tag + ".tar.gz"), "w:gz") as t:
        for path, data in files.items():
            i = tarfile.TarInfo(f"{tag}/{path}")
            i.size, i.mode = len(data), 0o644
            t.addfile(i, io.BytesIO(data))
    return tag + ".tar.gz"
