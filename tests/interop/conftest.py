"""The ranks that all interop tests share, and the planner behind a pipe."""
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


@pytest.fixture(scope="session")
def plan():
    """plan(op=…, …) asks plan_tool, see there."""
    tool = os.path.join(os.environ["TESTBIN"], "tools", "plan_tool")
    with subprocess.Popen([tool], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(**question):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()
