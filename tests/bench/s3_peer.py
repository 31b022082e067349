"""A peer that moves objects: s3_peer.py PEER ENDPOINT REGION BUCKET KEY FILE PART_MIB THREADS

PEER: boto3 (its transfer manager, a file of tmpfs), s3torchconnector (its client on AWS's CRT, memory), rclone (a process a run, the file).
Each line "put" or "get" of stdin is a run, and answered by "put SECONDS CPU_SECONDS"."""
import os
import pathlib
import resource
import subprocess
import sys
import time

peer, endpoint, region, bucket, key, path, part_mib, threads = sys.argv[1:]
part, threads = int(part_mib) << 20, int(threads)


def boto3_peer():
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=threads + 2, s3={"addressing_style": "path"}))
    config = TransferConfig(multipart_chunksize=part, multipart_threshold=part, max_concurrency=threads)
    return {"put": lambda: client.upload_file(path, bucket, key, Config=config),
            "get": lambda: client.download_file(bucket, key, path, Config=config)}


def s3torchconnector_peer():
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    client = S3Client(region, endpoint=endpoint, s3client_config=S3ClientConfig(part_size=part, force_path_style=True))
    content = pathlib.Path(path).read_bytes()

    def put():
        with client.put_object(bucket, key) as writer:
            writer.write(content)

    def get():
        with client.get_object(bucket, key) as reader:
            assert len(reader.read()) == len(content)

    return {"put": put, "get": get}


def rclone_peer():
    env = {k: v for k, v in os.environ.items() if k != "AWS_CA_BUNDLE"} | {"RCLONE_CONFIG": "/dev/null"}
    remote = f":s3:{bucket}/{key}"
    options = ["--s3-provider=Other", f"--s3-endpoint={endpoint}", f"--s3-region={region}", "--s3-env-auth", "--s3-force-path-style",
               f"--s3-chunk-size={part_mib}M", f"--s3-upload-concurrency={threads}", f"--s3-upload-cutoff={part_mib}M",
               f"--multi-thread-streams={threads}", f"--multi-thread-cutoff={part_mib}M", "--ignore-times", "--s3-no-check-bucket",
               "--s3-disable-checksum"]

    def run(source, target):
        subprocess.run(["rclone", "copyto", *options, source, target], env=env, check=True, stdout=subprocess.DEVNULL)

    return {"put": lambda: run(path, remote), "get": lambda: run(remote, path)}


def cpu():
    return sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


ways = {"boto3": boto3_peer, "s3torchconnector": s3torchconnector_peer, "rclone": rclone_peer}[peer]()
for line in sys.stdin:
    before, start = cpu(), time.monotonic()
    ways[line.strip()]()
    print(line.strip(), time.monotonic() - start, cpu() - before, flush=True)
