"""The package `dcpd` in a process of the tests, whose harness (tests/lib/dcpd.py) has the same name.

    with package.daemon(url) as dcpd:
        dcpd.load(…)
"""
import contextlib
import os
import pathlib
import sys

PATH = str(pathlib.Path(__file__).resolve().parents[2] / "api" / "python")
_module = []


@contextlib.contextmanager
def daemon(url):
    harness = sys.modules.pop("dcpd", None)
    before = os.environ.get("DCPD_URL")
    os.environ["DCPD_URL"] = url
    try:
        if _module:
            sys.modules["dcpd"] = _module[0]
        else:
            sys.path.insert(0, PATH)
            import dcpd

            sys.path.remove(PATH)
            assert PATH in str(dcpd.__file__), dcpd.__file__
            _module.append(dcpd)
        yield _module[0]
    finally:
        os.environ.pop("DCPD_URL")
        if before is not None:
            os.environ["DCPD_URL"] = before
        sys.modules.pop("dcpd", None)
        if harness is not None:
            sys.modules["dcpd"] = harness
