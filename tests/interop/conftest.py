"""The ranks that all interop tests share, and the planners behind pipes."""
import contextlib
import json
import os
import subprocess

import pytest

from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.close()


@contextlib.contextmanager
def asking(tool):
    """ask(**question) → answer of a program that takes and gives JSON, a line each."""
    path = os.path.join(os.environ["TESTBIN"], "tools", tool)
    with subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(**question):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


@pytest.fixture(scope="session")
def plan():
    """plan(op=…, …) asks plan_tool, see there."""
    with asking("plan_tool") as ask:
        yield ask


@pytest.fixture(scope="session")
def ask():
    """ask(op=…, …) asks tree_tool, see there."""
    with asking("tree_tool") as question:
        yield question
