"""python -m dcpd doctor | ls [STORAGE] | show REF"""
from __future__ import annotations

import os
import sys
from typing import List


def main(argv: List[str]) -> int:
    import dcpd

    try:
        if argv[:1] == ["doctor"]:
            from .doctor import main as doctor

            return doctor()
        if argv[:1] == ["ls"]:
            for c in dcpd.connect().checkpoints.list(*argv[1:2]):
                print(f"{c.get('storage', argv[1] if len(argv) > 1 else '')}:{c['name']}")
            return 0
        if len(argv) == 2 and argv[0] == "show":
            print(dcpd.open(argv[1]).tree())
            return 0
    except dcpd.DcpdError as e:
        print(f"dcpd: {e}", file=sys.stderr)
        return 3 if isinstance(e, dcpd.NoDaemon) else 5
    print("usage: python -m dcpd doctor | ls [STORAGE] | show REF      (dcpctl does the rest)", file=sys.stderr)
    return 2


def run() -> int:
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `… | head` has read enough; without /dev/null the interpreter's last flush raises again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


if __name__ == "__main__":
    sys.exit(run())
