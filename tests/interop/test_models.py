"""Llama, Qwen, GPT-2 and Mixtral as transformers makes them, to DCP over four ranks and back: equal logits."""
import os
import pathlib
import subprocess

import pytest

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.seconds(1800)
def test_transformers_models_come_back(spawn):
    d = spawn()
    env = {k: v for k, v in os.environ.items() if k != "DCPD_TEST_VENV"}
    venv = subprocess.run([HERE.parent / "venv.sh", HERE.parent / "requirements.txt", HERE.parent / "python/requirements-frameworks.txt"],
                          env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    r = subprocess.run([venv + "/bin/python", HERE / "on_models.py", d.socket, d.storages["main"]], capture_output=True, text=True,
                       env={**env, "HF_HUB_OFFLINE": "1"}, timeout=900)
    assert r.returncode == 0 and r.stdout.count(" ok\n") == 8, r.stdout + r.stderr[-4000:]
