"""One process loads a checkpoint, others look at the same memory: no copy, whatever their number.

    python sharing.py main:demo/step-20
"""
import os
import sys

import dcpd


def main():
    ref = sys.argv[1]
    client = dcpd.connect()
    name = f"shared-{os.getpid()}"
    client.jobs.run("load", source=ref, target={"state_dict": name, "world_size": 1, "lease_seconds": 60})
    try:
        for reader in range(3):
            if os.fork() == 0:
                with dcpd.attach(f"shm:{name}") as view:
                    total = sum(t.double().sum().item() for t in view.values() if hasattr(t, "double"))
                    print(f"reader {reader}: {len(view)} entries, sum {total:.6f}", flush=True)
                os._exit(0)
        assert all(os.wait()[1] == 0 for _ in range(3))
    finally:
        client.state_dicts.delete(name)


if __name__ == "__main__":
    main()
