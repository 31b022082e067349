"""api/openapi.yaml, tried on a real daemon by schemathesis: what the contract allows is taken, what it forbids is refused, and every
answer has the form that it says."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from crafted import FIXTURES

import dcpd as lib

HERE = pathlib.Path(__file__).resolve().parent
REQUESTS = []  # of each run
TIME = ("--max-time", os.environ.get("DCPD_CONTRACT_SECONDS", "600"))
EDGES = ("--phases", "examples,coverage", "--generation-deterministic")


@pytest.fixture(scope="module")
def schemathesis():
    got = subprocess.run([lib.ROOT / "tests/venv.sh", HERE / "schemathesis.txt"], stdout=subprocess.PIPE, text=True, check=True)
    program = pathlib.Path(got.stdout.strip()) / "bin/schemathesis"
    if not program.exists():
        pytest.skip("DCPD_TEST_VENV has no schemathesis")
    return program


def try_it(spawn, schemathesis, tmp_path, *args):
    d = spawn()
    shutil.copytree(FIXTURES / "torch-2.15.0/plain/checkpoint", d.storages["main"] / "a")
    d.put("train", [lib.image({"w": ("F32", [4, 4], bytes(64))})])
    token, port = (d.state / "token").read_text().strip(), d.tcp_client().tcp[1]
    command = [schemathesis, "--config-file", HERE / "schemathesis.toml", "--no-color", "run", lib.ROOT / "api/openapi.yaml", "-u",
               f"http://127.0.0.1:{port}", "-H", f"Authorization: Bearer {token}", "--checks", "all", "--continue-on-failure",
               "--request-timeout", "60", *args]
    r = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = re.sub(r"Bearer \S+", "Bearer …", r.stdout)
    assert r.returncode == 0, said[-12000:]
    assert re.search(r"Tested: +[1-9]\d*$", said, re.M), said[:3000]
    assert d.alive() and d.api.get("/readyz").status == 200
    REQUESTS.append(int(re.search(r"^ *(?:Test cases: +)?([\d,]+) generated", said, re.M)[1].replace(",", "")))
    print(f"{sum(REQUESTS):,} requests", flush=True)


@pytest.mark.long
@pytest.mark.seconds(240)
def test_the_contract_holds_at_its_edges(spawn, schemathesis, tmp_path):
    """Each bound of each field, and one beyond it: the same requests each time. createJob alone has thousands: see the next test."""
    try_it(spawn, schemathesis, tmp_path, *EDGES, "--exclude-operation-id", "createJob")


@pytest.mark.slow
@pytest.mark.seconds(600)
def test_the_contract_of_jobs_holds_at_its_edges(spawn, schemathesis, tmp_path):
    try_it(spawn, schemathesis, tmp_path, *EDGES, "--include-operation-id", "createJob")


@pytest.mark.slow
@pytest.mark.seconds(7200)
def test_the_contract_holds_for_whatever_comes(spawn, schemathesis, tmp_path):
    """Random requests, and sequences of them that use what earlier ones made; for make check-contract until there were so many in all. The
    seed is in the output."""
    try_it(spawn, schemathesis, tmp_path, *TIME)
    while sum(REQUESTS) < int(os.environ.get("DCPD_CONTRACT_REQUESTS", 0)):
        try_it(spawn, schemathesis, tmp_path, *TIME)
