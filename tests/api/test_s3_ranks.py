"""Ranks of torch.distributed on two hosts, each with a daemon of its own, that share nothing but a bucket: saves that PyTorch plans, and
dcpd's own, read back on both. Hosts are names here (DCPD_PLACE)."""
import sys

import pytest
from test_s3 import options
from test_spread_ranks import on

import dcpd as lib

pytest.importorskip("torch", reason="DCPD_TEST_VENV has no torch")
sys.path.append(str(lib.ROOT / "tests/python"))

import lib_ranks  # noqa: E402

pytestmark = pytest.mark.long  # four interpreters that import torch


@pytest.fixture(scope="module")
def hosts(tmp_path_factory, s3_server):
    daemons, ranks, place = [], None, lib.fresh("ranks")
    try:
        for name in ("alpha", "beta"):
            home = tmp_path_factory.mktemp(name)
            daemons.append(lib.Daemon(home, {"main": home / "main", "s3": f"s3://{s3_server.bucket}/{place}"}, options(s3_server),
                                      env=s3_server.environment()))
        ranks = lib_ranks.Ranks(4, {"GLOO_SOCKET_IFNAME": "lo"},
                                hosts=[({"DCPD_URL": f"unix://{d.socket}", "DCPD_PLACE": str(i)}, 2) for i, d in enumerate(daemons)])
        yield daemons, ranks
    finally:
        if ranks:
            ranks.close()
        for d in daemons:
            d.discard()


@pytest.mark.parametrize("how", ["", "async"])
def test_a_save_that_pytorch_plans_is_one_checkpoint_in_the_bucket(hosts, how):
    daemons, ranks = hosts
    name = f"run/planned{how}"
    ranks(on("plainly"), "on_hosts", "dropin_save", f"s3:{name}", 3, how)
    ranks(on("plainly"), "on_hosts", "dropin_load", f"s3:{name}", 3)
    ranks(on("plainly"), "on_hosts", "load", f"s3:{name}", 3)
    for d in daemons:
        d.api.run("verify", source={"storage": "s3", "name": name}, level="digest")
        shown = d.api.get(f"/v1/checkpoints/s3/{name.replace('/', '%2F')}/files").ok(200)["files"]
        assert {f["name"].split("_")[2] for f in shown if f["name"].endswith(".distcp")} == {"0", "1", "2", "3"}, shown
        saves = [j for j in d.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"] if j["kind"] == "save"]
        assert saves and all(j["state"] == "succeeded" for j in saves), saves


def test_a_save_of_dcpds_own_is_one_checkpoint_in_the_bucket(hosts):
    daemons, ranks = hosts
    assert [got[0] for got in ranks(on("plainly"), "on_hosts", "save", "s3:run/own", 5)] == ["succeeded"] * 4
    ranks(on("plainly"), "on_hosts", "load", "s3:run/own", 5)
    daemons[0].api.run("verify", source={"storage": "s3", "name": "run/own"}, level="digest")
