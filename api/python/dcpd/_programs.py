"""The programs that a wheel of `make wheel` carries in `_bin`, and the commands `dcpd` and `dcpctl`, which become them.

The wheel of Python alone has neither. The worker is found by the daemon, beside itself.
"""
from __future__ import annotations

import os
import sys
from typing import NoReturn, Optional


def inside(name: str) -> Optional[str]:
    """The path of a program of this package; None where the package has none."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_bin", name)
    return path if os.access(path, os.X_OK) else None


def _become(name: str) -> NoReturn:
    path = inside(name)
    if path is None:
        sys.exit(f"{name}: this package has no programs inside; install dcpd's wheel for this platform, or its Debian package")
    os.execv(path, [name, *sys.argv[1:]])


def dcpd() -> NoReturn:
    """The command `dcpd`."""
    _become("dcpd")


def dcpctl() -> NoReturn:
    """The command `dcpctl`."""
    _become("dcpctl")
