"""`python warm.py ARGUMENT…` is `python -m pytest ARGUMENT…` with PyTorch imported, once: what tests start by forks.Forks (programs, ranks)
are forks of this process, which has nothing of pytest yet."""
import os
import signal
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402, F401

import forks  # noqa: E402

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)
forks.warm_up()
sys.path[0] = os.getcwd()

import pytest  # noqa: E402

sys.exit(pytest.main())
