"""PyTorch with S3's connector: on_s3torchconnector.py read|write s3://BUCKET/NAME/ REGION

read prints the SHA-256 of each tensor's bytes; write saves the tensor "w" of test_s3_torch.py."""
import hashlib
import json
import sys

import torch
import torch.distributed.checkpoint as dcp
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

what, uri, region = sys.argv[1:]
config = S3ClientConfig(force_path_style=True)
if what == "read":
    metadata = S3StorageReader(region, uri, s3client_config=config).read_metadata()
    state = {k: torch.zeros(m.size, dtype=m.properties.dtype) for k, m in metadata.state_dict_metadata.items()}
    dcp.load(state, storage_reader=S3StorageReader(region, uri, s3client_config=config))
    print(json.dumps({k: hashlib.sha256(t.numpy().tobytes()).hexdigest() for k, t in state.items()}))
else:
    w = torch.frombuffer(bytearray(range(250)) * 40_000, dtype=torch.uint8)
    dcp.save({"w": w}, storage_writer=S3StorageWriter(region, uri, s3client_config=config))
