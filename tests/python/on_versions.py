"""Run under an older PyTorch: `on_versions.py DIRECTORY`. Both halves of the drop-in beside that version's own, and what 2.15 wrote."""
import inspect
import os
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from dcpd.torch import StorageReader, StorageWriter, install, uninstall

warnings.simplefilter("ignore")
ALONE = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}


def state(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(300, 400, generator=g), "z": torch.tensor(seed + 3.5), "bf": torch.randn(5, 3, generator=g).bfloat16(),
            "t": torch.randn(40, 30, generator=g).t(), "sub": {"lr": 0.1 + seed, "list": [seed, torch.arange(5) + seed]}}


def check(reader=None, **kw):
    new, want = state(1), state()
    dcp.load(new, storage_reader=reader, **ALONE, **kw)
    for k in ("w", "z", "bf", "t"):
        assert torch.equal(new[k], want[k]), (torch.__version__, k)
    assert torch.equal(new["sub"]["list"][1], torch.arange(5))
    assert new["sub"]["lr"] == 0.1 or torch.__version__.startswith("2.3.")  # whose load() leaves values in nested dicts alone


def main(folder):
    mine = os.path.join(folder, torch.__version__)
    dcp.save(state(), storage_writer=StorageWriter(mine + "-ours"), **ALONE)
    check(dcp.FileSystemReader(mine + "-ours"))
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(mine + "-theirs"), **ALONE)
    check(StorageReader(mine + "-theirs"))
    install()
    dcp.save(state(), checkpoint_id=mine + "-installed", **ALONE)
    check(checkpoint_id=mine + "-installed")
    uninstall()
    assert os.path.exists(mine + "-installed/.dcpd.json")
    for reader in (dcp.FileSystemReader, StorageReader):
        check(reader(os.path.join(folder, "newest")))


if __name__ == "__main__":
    main(sys.argv[1])
