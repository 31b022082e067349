"""An interpreter with DeepSpeed, beside the packages of this one: `run(*args)` starts tests/interop/on_deepspeed.py there."""
import fcntl
import hashlib
import os
import pathlib
import shutil
import site
import subprocess
import sys

INTEROP = pathlib.Path(__file__).resolve().parent.parent / "interop"
WANTED = INTEROP / "requirements-deepspeed.txt"


def python():
    """Made once per user, as tests/venv.sh makes its environment: the interpreter's path."""
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "dcpd"
    venv = root / f"deepspeed-{hashlib.sha256(WANTED.read_bytes() + sys.prefix.encode()).hexdigest()[:12]}"
    root.mkdir(parents=True, exist_ok=True)
    with open(f"{venv}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / ".complete").exists():
            shutil.rmtree(venv, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            [packages] = venv.glob("lib/python*/site-packages")
            (packages / "base.pth").write_text("\n".join(site.getsitepackages()))
            subprocess.run([venv / "bin/pip", "-q", "--disable-pip-version-check", "install", "-r", WANTED], check=True,
                           env={**os.environ, "DS_BUILD_OPS": "0"})
            (venv / ".complete").touch()
    return venv / "bin/python"


def start(*args, rank=0, world=1, port=0):
    env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1",
           **({"OMP_NUM_THREADS": "1"} if world > 1 else {})}
    return subprocess.Popen([python(), INTEROP / "on_deepspeed.py", *map(str, args)], env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def run(*args):
    """What it printed."""
    return ended([start(*args)])[0]


def ended(processes):
    texts = [p.communicate()[0] for p in processes]
    for text, p in zip(texts, processes):
        assert p.returncode == 0, text[-4000:]
    return texts
