"""One process: train, save every few steps without waiting, and go on where the last run stopped.

    python single.py main:demo --steps 20            # a reference, or a directory path
    python single.py main:demo --steps 40            # goes on from step 20
"""
import argparse
import os

import torch

import dcpd


def latest(where, client):
    """The newest step saved so far, or None."""
    storage, _, name = where.partition(":")
    steps = [int(c["name"].rsplit("-", 1)[1]) for c in client.checkpoints.list(storage, prefix=f"{name}/step-")]
    return max(steps, default=None)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("where", help="STORAGE:NAME")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--every", type=int, default=5)
    a = p.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    app = {"model": model, "optim": optim, "step": 0, "rng": torch.get_rng_state()}

    start = latest(a.where, dcpd.connect())
    if start is not None:
        dcpd.load(f"{a.where}/step-{start}", into=app)
        torch.set_rng_state(app["rng"])
        print(f"goes on from step {app['step']}")

    for step in range(app["step"] + 1, a.steps + 1):
        x = torch.randn(64, 32)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step % a.every == 0:
            app.update(step=step, rng=torch.get_rng_state())
            dcpd.async_save(app, f"{a.where}/step-{step}", step=step)
    print(f"step {app['step']}, loss {loss.item():.6f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
