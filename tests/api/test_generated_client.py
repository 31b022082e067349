"""A client that is made of api/openapi.yaml by somebody else's generator does real work: the contract is one that tools can read."""
import pathlib
import shutil
import subprocess

import dcpd as lib
import pytest
from crafted import FIXTURES

HERE = pathlib.Path(__file__).resolve().parent
CONFIG = """post_hooks: []
package_name_override: made
content_type_overrides: {application/yaml: text/plain, application/x-safetensors: application/octet-stream}
"""
WORK = HERE / "generated_client_work.py"


@pytest.fixture(scope="module")
def python():
    got = subprocess.run([lib.ROOT / "tests/venv.sh", HERE / "generated_client.txt"], stdout=subprocess.PIPE, text=True, check=True)
    bin_ = pathlib.Path(got.stdout.strip()) / "bin"
    if not (bin_ / "openapi-python-client").exists():
        pytest.skip("DCPD_TEST_VENV has no openapi-python-client")
    return bin_


def run(*command, **more):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)


@pytest.mark.long
@pytest.mark.seconds(300)
def test_a_generated_client_works(spawn, python, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    r = run(python / "openapi-python-client", "generate", "--path", lib.ROOT / "api/openapi.yaml", "--config", tmp_path / "config.yaml",
            "--meta", "none", "--output-path", tmp_path / "made", "--fail-on-warning", cwd=tmp_path)
    assert r.returncode == 0, r.stdout[-6000:]
    d = spawn()
    shutil.copytree(FIXTURES / "torch-2.15.0/plain/checkpoint", d.storages["main"] / "a")
    host, port = d.tcp_client().tcp
    r = run(python / "python", WORK, f"http://{host}:{port}", (d.state / "token").read_text().strip(), env={"PYTHONPATH": str(tmp_path)})
    assert r.returncode == 0, r.stdout[-6000:]
    assert r.stdout.splitlines()[-1] == "done"
