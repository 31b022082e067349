"""PyTorch's own readers and writers of object storage (s3torchconnector) and dcpd's checkpoints there, both ways."""
import hashlib
import json
import os
import subprocess
import sys

import pytest
from s3_server import environment_of_tools
from test_s3 import MB, d, loads, ref, saved  # noqa: F401: d is a fixture

import dcpd as lib

pytestmark = pytest.mark.long


@pytest.fixture
def connector(d, s3_server):  # noqa: F811
    """Runs PyTorch, of this interpreter's environment, with the connector of the other."""
    [packages] = environment_of_tools().parents[1].glob("lib/python*/site-packages")
    env = {**os.environ, **s3_server.environment(), "AWS_ENDPOINT_URL": s3_server.endpoint, "PYTHONPATH": str(packages)}

    def run(what, name):
        made = subprocess.run([sys.executable, lib.ROOT / "tests/lib/on_s3torchconnector.py", what, f"{d.storages['s3']}/{name}/",
                               s3_server.region], env=env, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr[-4000:]
        return made.stdout

    return run


def test_pytorch_reads_what_dcpd_saved(d, connector):  # noqa: F811
    name, images = saved(d, size=9 * MB + 17)
    wanted = {k: hashlib.sha256(b).hexdigest() for i in images for k, (_, _, b) in lib.Image(i).entries.items()}
    assert json.loads(connector("read", name)) == wanted


def test_dcpd_reads_what_pytorch_saved(d, connector):  # noqa: F811
    name = f"torch/{lib.fresh()}"
    connector("write", name)
    d.api.run("verify", source=ref("s3", name))
    loads(d, name, [lib.image({"w": ("U8", [10_000_000], bytes(range(250)) * 40_000)})])
