"""boto3's transfer manager, between memory (a file of tmpfs) and an object: s3_peer.py ENDPOINT BUCKET KEY FILE PART_MIB THREADS

Each line "put" or "get" of stdin is a run, and answered by "put SECONDS CPU_SECONDS"."""
import resource
import sys
import time

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

endpoint, bucket, key, path, part, threads = sys.argv[1:]
client = boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=int(threads) + 2, s3={"addressing_style": "path"}))
config = TransferConfig(multipart_chunksize=int(part) << 20, multipart_threshold=int(part) << 20, max_concurrency=int(threads))


def cpu():
    r = resource.getrusage(resource.RUSAGE_SELF)
    return r.ru_utime + r.ru_stime


for line in sys.stdin:
    before, start = cpu(), time.monotonic()
    if line.startswith("put"):
        client.upload_file(path, bucket, key, Config=config)
    else:
        client.download_file(bucket, key, path, Config=config)
    print(line.strip(), time.monotonic() - start, cpu() - before, flush=True)
