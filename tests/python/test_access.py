"""Who can read the files of a checkpoint: their mode and group, everywhere, and PyTorch, safetensors and dcpd as another user."""
import contextlib
import os
import shutil
import stat
import sys

import harness as lib
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import users

import dcpd
from dcpd.torch import StorageReader, StorageWriter

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
              pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")]
GROUP = users.GROUP
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/bin")


@pytest.fixture
def reachable():
    with users.reachable_folder() as folder:
        yield folder


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def state(x):
    return {"w": torch.full((1 << 12,), float(x)), "v": {"x": x}}


def load(path, reader=dcp.FileSystemReader):
    sd = state(-1)
    dcp.load(sd, storage_reader=reader(path), no_dist=True)
    assert sd["w"].eq(sd["v"]["x"]).all()
    return sd["v"]["x"]


def as_user(groups, fn, *args):
    return users.as_user(users.ALICE, groups, fn, *args)


def check(root, mode, gid):
    """Everything beneath a root: at least some files, and directories of names of several parts."""
    seen = 0
    for at, dirs, files in os.walk(root):
        for name in dirs + files:
            s = os.lstat(os.path.join(at, name))
            want = mode | (mode & 0o444) >> 2 if stat.S_ISDIR(s.st_mode) else mode
            assert stat.S_IMODE(s.st_mode) & 0o777 == want and s.st_gid == gid, (os.path.join(at, name), oct(s.st_mode), s.st_gid)
            seen += 1
    assert seen > 5, seen


def all_kinds(d, root, storage):
    """Checkpoints of every way that files come there."""
    train = lib.fresh("s")
    d.put(train, [lib.image({"w": ("F32", [4], bytes(16))}, {"values": {"step": {"json": 1}}})])
    for name in ("run/deep/x", "run/deep/y"):
        d.api.run("save", source={"state_dict": train}, target={"storage": storage, "name": name})
    d.api.run("save", source={"state_dict": train}, target={"storage": storage, "name": "run/deep/x"}, options={"overwrite": True})
    d.api.run("reshard", source={"storage": storage, "name": "run/deep/x"}, target={"storage": storage, "name": "hf/x",
                                                                                      "format": "safetensors"})
    dcp.save(state(7), storage_writer=StorageWriter(root / "torch" / "x"), no_dist=True)
    kept = root / "with" / "others"
    kept.mkdir(parents=True)
    for made in (kept, kept.parent):
        made.chmod(stat.S_IMODE((root / "run").stat().st_mode))
        os.chown(made, -1, (root / "run").stat().st_gid)
    dcp.save(state(8), storage_writer=StorageWriter(kept), no_dist=True)
    dcp.save(state(9), storage_writer=StorageWriter(root / "local" / "x"), no_dist=True, use_collectives=False)
    lib.wait_for(lambda: not d.staging(), 5, "trash")


def test_all_files_get_mode_and_group(spawn, reachable, monkeypatch):
    roots = {"main": reachable / "main", "open": reachable / "open"}
    with umask(0o077):
        d = spawn(roots, ["--file-mode", "0640", "--file-group", GROUP.gr_name, "--open.file-mode=0664"])
    monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
    for name, mode in (("main", 0o640), ("open", 0o664)):
        all_kinds(d, roots[name], name)
        check(roots[name], mode, GROUP.gr_gid)
    dcpd.close()


def test_another_user_goes_back_to_pytorch(spawn, reachable, monkeypatch):
    root = reachable / "main"
    d = spawn({"main": root}, ["--file-mode", "0640", "--file-group", GROUP.gr_name])
    root.chmod(0o755)
    monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
    all_kinds(d, root, "main")
    dcpd.close()
    # what is imported late is here before root's folders are out of reach
    safetensors.torch.load_file(next((root / "hf/x").glob("*.safetensors")))
    assert load(root / "torch/x") == load(root / "torch/x", StorageReader) == 7
    dcpd.close()
    member = [GROUP.gr_gid]
    assert as_user(member, load, root / "torch/x") == "7"
    assert as_user(member, load, root / "local/x") == "9"
    assert "tensor" in as_user(member, lambda: safetensors.torch.load_file(next((root / "hf/x").glob("*.safetensors"))))
    assert "Permission denied" in as_user([], load, root / "torch/x")
    home = reachable / "home"
    home.mkdir()
    os.chown(home, users.ALICE, users.ALICE)
    home.chmod(0o700)

    def with_own_daemon():
        del os.environ["DCPD_URL"]
        sys.executable = SYSTEM_PYTHON  # the tests' own is in root's folders
        os.environ.update(HOME=str(home), XDG_STATE_HOME=str(home), XDG_RUNTIME_DIR=str(home), DCPD_BIN=str(lib.BIN))
        return load(root / "torch/x", StorageReader)

    if SYSTEM_PYTHON and "True" in as_user(member, os.access, lib.BIN / "dcpd", os.X_OK):
        assert as_user(member, with_own_daemon) == "7"


@pytest.mark.parametrize("mask, service, mode", [(0o022, False, 0o644), (0o077, False, 0o600), (0o077, True, 0o640)])
def test_defaults(spawn, tmp_path, mask, service, mode):
    """As the umask says, which is PyTorch's way too; a service's group can read."""
    with umask(mask):
        d = spawn(env={"RUNTIME_DIRECTORY": str(tmp_path)} if service else None)
    d.put("s", [lib.image({"w": ("F32", [4], bytes(16))})])
    for name in ("a/b", "a/c"):
        d.api.run("save", source={"state_dict": "s"}, target={"storage": "main", "name": name})
    check(d.storages["main"], mode, os.getegid())


def test_a_directory_that_hands_down_its_group(spawn):
    d = spawn(args=["--file-mode", "0640"])
    os.chown(d.storages["main"], -1, GROUP.gr_gid)
    d.storages["main"].chmod(0o2750)
    d.put("s", [lib.image({"w": ("F32", [4], bytes(16))})])
    for name in ("a/b", "a/c"):
        d.api.run("save", source={"state_dict": "s"}, target={"storage": "main", "name": name})
    check(d.storages["main"], 0o640, GROUP.gr_gid)
    assert (d.storages["main"] / "a/b").stat().st_mode & stat.S_ISGID
