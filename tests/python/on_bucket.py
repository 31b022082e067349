"""The drop-in on object storage: on_bucket.py NAME ("s3:run/a")

Saves tensors and values with StorageWriter, loads them with StorageReader over others, and prints what differs; then what each of two
readers makes of a checkpoint that is replaced behind its metadata, and of one that is not there."""
import json
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp

import dcpd
from dcpd.torch import StorageReader, StorageWriter

name = sys.argv[1]
warnings.simplefilter("ignore")


def state(seed):
    torch.manual_seed(seed)
    return {"w": torch.randn(700, 300), "half": torch.randn(33).to(torch.bfloat16), "empty": torch.zeros(0), "step": seed,
            "nested": {"lr": 0.1 * seed, "names": ["a", "b" * seed]}}


def differ(a, b):
    return [k for k in a if not (torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k])]


def load(reader):
    got = state(1)
    dcp.load(got, storage_reader=reader, no_dist=True)
    return got


said = {}
dcp.save(state(3), storage_writer=StorageWriter(name), no_dist=True)
said["differ"] = differ(state(3), load(StorageReader(name)))
said["plain"] = differ({"w": state(3)["w"]}, dcpd.load(name))
reader = StorageReader(name)
read_metadata = reader.read_metadata


def then_replaced(*args, **kwargs):
    metadata = read_metadata(*args, **kwargs)
    dcp.save(state(5), storage_writer=StorageWriter(f"{name}-2"), no_dist=True)
    client = dcpd.client.connect()
    client.jobs.wait(client.checkpoints.delete(name))
    client.jobs.wait(client.checkpoints.copy(f"{name}-2", name))
    return metadata


reader.read_metadata = then_replaced
for key, one in (("replaced", reader), ("absent", StorageReader(f"{name}-none"))):
    try:
        load(one)
        said[key] = "loaded"
    except BaseException as e:  # PyTorch raises such
        said[key] = f"{type(e).__name__}: {e}"
print(json.dumps(said))
