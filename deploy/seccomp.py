#!/usr/bin/env python3
"""seccomp.py DEFAULT.json > deploy/seccomp.json: Docker's default seccomp profile, with io_uring allowed.

Docker denies io_uring by default since version 25. DEFAULT.json is profiles/seccomp/default.json of the Moby project (Apache-2.0); Debian
13 has that of Docker 26.1.5 in the package golang-github-docker-docker-dev, from which the deploy/seccomp.json of this tree is made:

    apt-get download golang-github-docker-docker-dev && dpkg -x golang-github-docker-docker-dev_*.deb x
    deploy/seccomp.py x/usr/share/gocode/src/github.com/docker/docker/profiles/seccomp/default.json > deploy/seccomp.json

Nothing else is changed; a profile that allows io_uring already comes out as it went in.
"""
import json
import sys

IO_URING = ("io_uring_enter", "io_uring_register", "io_uring_setup")


def with_io_uring(profile):
    if profile.get("defaultAction") != "SCMP_ACT_ERRNO":
        sys.exit("seccomp.py: this profile does not deny by default: it is not Docker's")
    for rule in profile["syscalls"]:
        if rule["action"] == "SCMP_ACT_ALLOW" and not any(rule.get(k) for k in ("args", "includes", "excludes")):
            rule["names"] += [n for n in IO_URING if n not in rule["names"]]
            return profile
    sys.exit("seccomp.py: this profile has no list of calls that are always allowed")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with open(sys.argv[1]) as f:
        json.dump(with_io_uring(json.load(f)), sys.stdout, indent="\t")
    print()
