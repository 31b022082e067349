"""What the scripts for hosts with a GPU share: why there is none, Python with PyTorch, and how much they may put where. Standard library
alone, as the first of them runs before PyTorch is found."""
import ctypes
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHM = "/dev/shm"


def why_not():
    """Why this host cannot be tried; "" if it can."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 was not found: no NVIDIA driver is installed here"
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver shows no GPU to this process: `dcpctl doctor` says what is missing"
    return ""


def tries(program, otherwise, device):
    """Whether the program goes on, with PyTorch: on a host without a GPU it says why it is skipped. A device "cpu" needs none."""
    reason = why_not() if device == "cuda" else ""
    if reason:
        print(f"{program}: skipped, {otherwise}: {reason}")
        return False
    with_torch()
    return True


def with_torch():
    """Goes on as a Python that has PyTorch: this one, or that of the tests (DCPD_TEST_VENV=DIR names another)."""
    if importlib.util.find_spec("torch") is not None:
        return
    venv = pathlib.Path(subprocess.run([ROOT / "tests/venv.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    python = next((p for p in (venv / "bin/python", venv / "bin/python3") if os.access(p, os.X_OK)), None)
    if python is None or os.environ.get("DCPD_GPU_WITH_TORCH"):
        sys.exit(f"{venv} has no Python with torch: DCPD_TEST_VENV=DIR names one")
    os.environ["DCPD_GPU_WITH_TORCH"] = "1"
    os.execv(python, [str(python), *sys.argv])


def find_nccl():
    """Puts PyTorch's own NCCL where dcpd and the tests find it, if the host has none."""
    try:
        ctypes.CDLL("libnccl.so.2")
        return
    except OSError:
        pass
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    for place in found.submodule_search_locations or () if found else ():
        if os.path.exists(os.path.join(place, "lib/libnccl.so.2")):
            os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, (os.environ.get("LD_LIBRARY_PATH"), os.path.join(place, "lib"))))


def free(folder):
    """Bytes that a file system has room for."""
    return shutil.disk_usage(folder).free


def free_memory():
    """Bytes of memory that this host can still give."""
    text = pathlib.Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) << 10


def device_bytes(client):
    """Bytes that the daemon has copied from and to GPUs."""
    lines = client._t.raw("GET", "/metrics").body.decode().splitlines()
    return sum(int(float(x.split()[-1])) for x in lines if x.startswith("dcpd_device_copy_bytes_total"))
