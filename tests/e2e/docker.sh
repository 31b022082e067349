#!/bin/bash
# docker.sh: the container and the compose file, for real. Exit 77 says that this machine cannot run them, and why.
#
# Builds, comes up healthy, saves from a trainer's container of another uid; recreates, kills and restricts dcpd's container and
# shows each time that the snapshots in shared memory and the saved checkpoints are still there and that saving goes on.
# Everything it makes carries a name of its own and is removed at the end. DCPD_BASE=IMAGE chooses the base image. DOCKER_START=1
# starts an engine of its own for the time of the test, where none answers (as root; it sets packet filter rules, as engines do).
set -euo pipefail

cd "$(dirname "$0")/../.."
here=$PWD/tests/e2e
skip() { echo "skipped: $*"; exit 77; }
step() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

command -v docker >/dev/null || skip "no docker command"
docker compose version >/dev/null 2>&1 || skip "docker has no compose plugin"
work=$(mktemp -d)
engine=
end_engine() {
	[ -z "$engine" ] || { kill "$engine" 2>/dev/null && wait "$engine" || true; }
	rm -rf "$work"
}
trap end_engine EXIT
if ! docker info >/dev/null 2>&1 && [ -n "${DOCKER_START:-}" ] && command -v dockerd >/dev/null && [ "$(id -u)" -eq 0 ]; then
	export DOCKER_HOST=unix://$work/docker.sock
	dockerd -H "$DOCKER_HOST" --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/pid" >"$work/dockerd.log" 2>&1 &
	engine=$!
	for _ in $(seq 100); do docker info >/dev/null 2>&1 && break; sleep 0.3; done
	step "started an engine"
fi
docker info >/dev/null 2>&1 || skip "no container engine answers (${DOCKER_HOST:-/var/run/docker.sock})"

export DCPD_BASE=${DCPD_BASE:-debian:bookworm-slim}
export COMPOSE_PROJECT_NAME=dcpd-e2e-$$ DCPD_IMAGE=dcpd-e2e:$$ DCPD_TRAINER_IMAGE=dcpd-e2e-trainer:$$
export DCPD_PORT=0 DCPD_SHM_SIZE=256mb
files=(-f deploy/compose.yaml)
compose() { docker compose --progress quiet "${files[@]}" --profile example "$@"; }
cleanup() {
	local rc=$?
	[ $rc -eq 0 ] || { echo "--- dcpd says:"; compose logs --no-log-prefix --tail 40 dcpd 2>/dev/null || true; }
	compose down -v --remove-orphans -t 5 >/dev/null 2>&1 || true
	docker image rm -f "$DCPD_IMAGE" "$DCPD_TRAINER_IMAGE" >/dev/null 2>&1 || true
	end_engine
	exit $rc
}
trap cleanup EXIT

if ! docker image inspect "$DCPD_BASE" >/dev/null 2>&1 && ! docker pull -q "$DCPD_BASE" >/dev/null 2>&1; then
	command -v debootstrap >/dev/null && [ "$(id -u)" -eq 0 ] || skip "no image $DCPD_BASE, and no debootstrap to make one"
	step "making $DCPD_BASE with debootstrap"
	debootstrap --variant=minbase bookworm "$work/base" >/dev/null
	tar -C "$work/base" -c . | docker import - "$DCPD_BASE" >/dev/null
	rm -rf "$work/base"
fi

trainer() { compose run --rm --no-deps -T trainer --run r --mib 4 "$@"; }
ctl() { compose exec -T dcpd dcpctl "$@"; }
segments() { compose exec -T shm sh -c 'ls -i /dev/shm | sort'; }
engine_of() { # what workers read and write with, as the daemon says
	compose exec -T dcpd curl -fsS --unix-socket /run/dcpd/dcpd.sock http://localhost/v1/capabilities |
		python3 -c 'import json, re, sys; print(re.search(r"\"engine\": \"(\w+)\"", json.dumps(json.load(sys.stdin))).group(1))'
}
up() { compose up -d --wait --no-build "$@" >"$work/up.log" 2>&1 || { cat "$work/up.log"; return 1; }; }
holds() { # STEP...: these checkpoints are visible and whole
	local n
	for n in "$@"; do
		ctl verify "main:r/step-$n" --level digest >"$work/verify.log" 2>&1 || { cat "$work/verify.log"; return 1; }
	done
}

step "build"
compose build -q >"$work/build.log" 2>&1 || { tail -40 "$work/build.log"; exit 1; }
[ "$(docker run --rm --entrypoint id "$DCPD_IMAGE" -u)" = 8427 ]

step "up, healthy"
up dcpd
id=$(compose ps -q dcpd)
[ "$(docker inspect -f '{{.State.Health.Status}}' "$id")" = healthy ]
address=$(compose port dcpd 8427)
python3 - "$address" <<-'PY'
	import sys, urllib.error, urllib.request
	base = "http://" + sys.argv[1]
	assert b"<title>dcpd" in urllib.request.urlopen(base + "/", timeout=10).read()
	try:
	    urllib.request.urlopen(base + "/v1/jobs", timeout=10)
	except urllib.error.HTTPError as error:
	    assert error.code == 401, error.code
	else:
	    sys.exit("the published port answers without a token")
PY

step "a trainer of uid 10001 saves"
trainer --first 1 --steps 1
holds 1
step "workers use $(engine_of)"
step "it seals another generation and ends"
trainer --first 2 --steps 1 --seal-only
before=$(segments)
[ -n "$before" ]

step "dcpd's container is recreated: the segments stay, the sealed generation is saved"
up --force-recreate dcpd
[ "$(compose ps -q dcpd)" != "$id" ]
[ "$(segments)" = "$before" ]
trainer --first 2 --steps 1 --save-only
holds 1 2

step "dcpd's container is killed: the same"
trainer --first 3 --steps 1 --seal-only
before=$(segments)
docker kill -s KILL "$(compose ps -q dcpd)" >/dev/null
up dcpd
[ "$(segments)" = "$before" ]
trainer --first 3 --steps 1 --save-only
holds 1 2 3

step "without io_uring, as under Docker's newer default profile: the thread pool saves"
printf 'services:\n  dcpd:\n    security_opt: ["seccomp=%s"]\n' "$here/no-io-uring.json" >"$work/seccomp.yaml"
files+=(-f "$work/seccomp.yaml")
up dcpd
trainer --first 4 --steps 1
holds 1 2 3 4
[ "$(engine_of)" = threads ]
ctl status

step "stopped: it ends well"
compose stop -t 30 dcpd >/dev/null 2>&1
[ "$(docker inspect -f '{{.State.ExitCode}}' "$(compose ps -aq dcpd)")" = 0 ]
step "all well"
