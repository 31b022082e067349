#!/bin/bash
# docker.sh: the container and the compose file, for real. Exit 77 says that this machine cannot run them, and why.
#
# Builds, comes up healthy, saves from a trainer's container of another uid; recreates, kills, upgrades and restricts dcpd's container and
# shows each time that the snapshots in shared memory and the saved checkpoints are still there and that saving goes on: under the default
# seccomp profile, without io_uring, with deploy/seccomp.json, with 64 MiB of shared memory, stopped in a save, with a full volume.
# Everything it makes carries a name of its own and is removed at the end. DCPD_BASE=IMAGE chooses the base image. DOCKER_START=1 starts
# an engine of its own for the time of the test (engine.sh; as root), where none answers. That one leaves the packet filter alone: builds
# use the host's network.
set -euo pipefail

cd "$(dirname "$0")/../.."
here=$PWD/tests/e2e
. tests/e2e/version.sh
skip() { echo "skipped: $*"; exit 77; }
step() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

work=$(mktemp -d)
engine=
end_engine() {
	[ -z "$engine" ] || { kill "$engine" 2>/dev/null && wait "$engine" || true; }
	rm -rf "$work"
}
trap end_engine EXIT
if ! { docker info && docker compose version; } >/dev/null 2>&1 && [ -n "${DOCKER_START:-}" ] && [ "$(id -u)" -eq 0 ]; then
	programs=$(tests/e2e/engine.sh)
	export PATH=$programs/bin:$PATH DOCKER_CONFIG=$work/client DOCKER_HOST=unix://$work/docker.sock
	mkdir -p "$work/client"
	ln -s "$programs/cli-plugins" "$work/client/cli-plugins"
	dockerd -H "$DOCKER_HOST" --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/pid" --bridge none --iptables=false \
		--ip6tables=false >"$work/dockerd.log" 2>&1 &
	engine=$!
	for _ in $(seq 100); do docker info >/dev/null 2>&1 && break; sleep 0.3; done
	step "started an engine"
fi
command -v docker >/dev/null || skip "no docker command"
docker compose version >/dev/null 2>&1 || skip "docker has no compose plugin"
docker info >/dev/null 2>&1 || skip "no container engine answers (${DOCKER_HOST:-/var/run/docker.sock})"

export DCPD_BASE=${DCPD_BASE:-debian:bookworm-slim}
image=dcpd-e2e:$$
export COMPOSE_PROJECT_NAME=dcpd-e2e-$$ DCPD_IMAGE=$image DCPD_TRAINER_IMAGE=dcpd-e2e-trainer:$$
export DCPD_PORT=0 DCPD_SHM_SIZE=256mb DCPD_GPU_IMAGE=dcpd-e2e-cuda:$$
printf 'services: {dcpd: {build: {network: host}}, trainer: {build: {network: host}}}\n' >"$work/network.yaml"
base=(-f deploy/compose.yaml -f "$work/network.yaml")
files=("${base[@]}")
compose() { docker compose --progress quiet "${files[@]}" --profile example "$@"; }
cleanup() {
	local rc=$?
	[ $rc -eq 0 ] || { echo "--- dcpd says:"; compose logs --no-log-prefix --tail 40 dcpd 2>/dev/null || true; }
	docker rm -f "$COMPOSE_PROJECT_NAME"-{victim,load,late} >/dev/null 2>&1 || true
	compose down -v --remove-orphans -t 5 >/dev/null 2>&1 || true
	docker image rm -f "$image"{,-next} "$DCPD_TRAINER_IMAGE" "$DCPD_GPU_IMAGE" >/dev/null 2>&1 || true
	end_engine
	exit $rc
}
trap cleanup EXIT

if ! docker image inspect "$DCPD_BASE" >/dev/null 2>&1 && ! docker pull -q "$DCPD_BASE" >/dev/null 2>&1; then
	[ "$(id -u)" -eq 0 ] || skip "no image $DCPD_BASE, and no rights to make one"
	step "making $DCPD_BASE with debootstrap"
	# As the slim image does.
	tar -C "$(tests/debian.sh)" --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' --exclude='./usr/share/doc/*' \
		--exclude='./usr/share/man/*' --exclude='./usr/share/info/*' --exclude='./usr/share/locale/*' -c . |
		docker import - "$DCPD_BASE" >/dev/null
fi

trainer() { compose run --rm --no-deps -T trainer --run r --mib 4 "$@"; }
ctl() { compose exec -T dcpd dcpctl "$@"; }
segments() { compose exec -T shm sh -c 'ls -i /dev/shm | sort'; }
engine_of() { # what workers read and write with, as the daemon says
	compose exec -T dcpd curl -fsS --unix-socket /run/dcpd/dcpd.sock http://localhost/v1/capabilities |
		python3 -c 'import json, re, sys; print(re.search(r"\"engine\": \"(\w+)\"", json.dumps(json.load(sys.stdin))).group(1))'
}
up() { compose up -d --wait --no-build "$@" >"$work/up.log" 2>&1 || { cat "$work/up.log"; return 1; }; }
refused() { # WORDS COMMAND...: it fails, and says WORDS
	local words=$1
	shift
	if "$@" >"$work/refused.log" 2>&1; then
		echo "not refused: $*"
		return 1
	fi
	grep -qF "$words" "$work/refused.log" || { cat "$work/refused.log"; return 1; }
}
holds() { # STEP...: these checkpoints are visible and whole
	local n
	for n in "$@"; do
		ctl verify "main:r/step-$n" --level digest >"$work/verify.log" 2>&1 || { cat "$work/verify.log"; return 1; }
	done
}

step "build"
compose build -q >"$work/build.log" 2>&1 || { tail -40 "$work/build.log"; exit 1; }
[ "$(docker run --rm --entrypoint id "$DCPD_IMAGE" -u)" = 8427 ]
megabytes=$(($(docker image inspect -f '{{.Size}}' "$DCPD_IMAGE") / 1000000))
step "the image has $megabytes MB"
[ "$megabytes" -le 120 ]
make -s sbom IMAGE="$DCPD_IMAGE" >/dev/null
grep -q '"name": "libmicrohttpd12"' build/sbom/image.cdx.json

step "up, healthy"
began=$(date +%s%N)
since() { echo $((($(date +%s%N) - began) / 1000000)); }
compose up -d --no-build dcpd >"$work/up.log" 2>&1 || { cat "$work/up.log"; exit 1; }
until curl -fsS -o /dev/null --max-time 1 "http://$(compose port dcpd 8427)/readyz" 2>/dev/null; do
	[ "$(since)" -lt 60000 ]
	sleep 0.05
done
ready=$(since)
step "it answers as ready after $ready ms"
up dcpd
step "Docker calls it healthy after $(since) ms"
id=$(compose ps -q dcpd)
[ "$(docker inspect -f '{{.State.Health.Status}}' "$id")" = healthy ]
address=$(compose port dcpd 8427)
refused "Read-only file system" compose exec -T -u 0 dcpd touch /usr/bin/x
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

step "a trainer is killed as it trains: its last snapshot stays, dcpd goes on"
compose run -d --no-deps --name "$COMPOSE_PROJECT_NAME-victim" trainer --name victim --run v --mib 32 --steps 1000 >/dev/null
for _ in $(seq 100); do ctl ls main:v --json 2>/dev/null | grep -q v/step-2 && break; sleep 0.2; done
docker kill -s KILL "$COMPOSE_PROJECT_NAME-victim" >/dev/null
docker rm -f "$COMPOSE_PROJECT_NAME-victim" >/dev/null
ctl drain main:v --wait 60s
ctl verify main:v/step-2 --level digest >/dev/null
ctl ls shm: | grep -q victim

step "an image of the next version, under load: what was being saved is saved"
mkdir "$work/next"
printf '%s' "$(as_version "$newer")" >"$work/next/version.sed"
cat >"$work/next/Dockerfile" <<-DOCKERFILE
	FROM $DCPD_IMAGE
	USER root
	COPY version.sed /tmp/
	RUN LC_ALL=C sed -i -E -f /tmp/version.sed /usr/bin/dcpd /usr/bin/dcpd-worker /usr/bin/dcpctl
	USER dcpd
	DOCKERFILE
docker build -q --network host -t "$DCPD_IMAGE-next" "$work/next" >/dev/null
runs() { # VERSION: of the daemon that answers
	[ "$(compose exec -T dcpd curl -fsS --unix-socket /run/dcpd/dcpd.sock http://localhost/v1/capabilities |
		python3 -c 'import json, sys; print(json.load(sys.stdin)["version"])')" = "$1" ]
}
runs "$version"
compose run -d --no-deps --name "$COMPOSE_PROJECT_NAME-load" trainer --name load --run l --mib 32 --steps 1000 >/dev/null
for _ in $(seq 100); do ctl ls main:l --json 2>/dev/null | grep -q l/step-1 && break; sleep 0.2; done
DCPD_IMAGE=$DCPD_IMAGE-next
up dcpd
runs "$newer"
docker rm -f "$COMPOSE_PROJECT_NAME-load" >/dev/null
ctl drain main:l --wait 60s || true # a save that the old one had not begun may have failed with its trainer's connection
names=$(ctl ls main:l --json | python3 -c 'import json, sys; print(*[c["name"] for c in json.load(sys.stdin)])')
[[ " $names " == *" l/step-1 "* ]]
for n in $names; do
	ctl verify "main:$n" --level digest >/dev/null
done

step "load what was saved, save that, compare"
ctl load main:r/step-1 shm:back >/dev/null
ctl save shm:back main:again/step-1 >/dev/null
ctl diff main:r/step-1 main:again/step-1 >/dev/null
ctl rm shm:back --yes >/dev/null

seccomp() { # the profile for dcpd's container
	printf 'services:\n  dcpd:\n    security_opt: ["seccomp=%s"]\n' "$1" >"$work/seccomp.yaml"
	files=("${base[@]}" -f "$work/seccomp.yaml")
	up dcpd
}
step "without io_uring, as under Docker's newer default profile: the thread pool saves"
seccomp "$here/no-io-uring.json"
trainer --first 4 --steps 1
holds 1 2 3 4
[ "$(engine_of)" = threads ]
ctl status
step "under deploy/seccomp.json: io_uring"
seccomp "$PWD/deploy/seccomp.json"
trainer --first 5 --steps 1
holds 5
[ "$(engine_of)" = io_uring ]
files=("${base[@]}")

step "SIGTERM in a save: it ends, or the next daemon ends it. SIGKILL: the next daemon ends it"
up dcpd
n=6
for signal in TERM KILL; do
	trainer --name big --first $n --steps 1 --seal-only --mib 64
	compose run -d --no-deps --name "$COMPOSE_PROJECT_NAME-late" trainer --name big --run r --first $n --steps 1 --save-only >/dev/null
	for _ in $(seq 100); do ctl jobs --json | grep -q r/step-$n && break; sleep 0.05; done
	if [ $signal = TERM ]; then
		compose stop -t 30 dcpd >/dev/null 2>&1
		[ "$(docker inspect -f '{{.State.ExitCode}}' "$(compose ps -aq dcpd)")" = 0 ]
	else
		docker kill -s KILL "$(compose ps -q dcpd)" >/dev/null
	fi
	up dcpd
	ctl drain main:r --wait 60s
	docker rm -f "$COMPOSE_PROJECT_NAME-late" >/dev/null
	holds 1 $n
	n=$((n + 1))
done

step "the volume is full: the save fails in words, nothing is visible, the next one works"
cat >"$work/full.yaml" <<-'YAML'
	services:
	  dcpd:
	    volumes: ["full:/checkpoints"]
	volumes:
	  full:
	    driver_opts: {type: tmpfs, device: tmpfs, o: "size=8m,uid=8427,gid=8427,mode=750"}
	YAML
files=("${base[@]}" -f "$work/full.yaml")
up dcpd
refused storage_full trainer --name full --run f --first 1 --steps 1 --mib 16
refused not_found ctl show main:f/step-1 --json
trainer --name small --run f --first 2 --steps 1 --mib 1
ctl verify main:f/step-2 --level digest >/dev/null
files=("${base[@]}")

step "64 MiB of shared memory: what does not fit is refused in words, what fits is saved"
compose down -t 5 >/dev/null 2>&1
DCPD_SHM_SIZE=64mb
up dcpd
refused shm_exhausted trainer --name large --first 8 --steps 1 --mib 128
trainer --first 8 --steps 1
holds 1 8

step "the image for GPU hosts, on a base without CUDA: it comes up, and saves"
docker build -q --network host -f deploy/Dockerfile.cuda --build-arg "BASE=$DCPD_BASE" --build-arg "CUDA_BASE=$DCPD_BASE" \
	-t "$DCPD_GPU_IMAGE" . >"$work/build.log" 2>&1 || { tail -40 "$work/build.log"; exit 1; }
[ "$(docker run --rm --entrypoint id "$DCPD_GPU_IMAGE" -u)" = 8427 ]
next=$DCPD_IMAGE
DCPD_IMAGE=$DCPD_GPU_IMAGE
up dcpd
runs "$version"
trainer --first 9 --steps 1
holds 8 9
ctl doctor --json >"$work/doctor" || true
grep -q '"libcuda.so.1 was not found' "$work/doctor"
DCPD_IMAGE=$next
up dcpd

step "GPUs that are not there: the override is valid, and the refusal is in words"
gpu=(docker compose "${base[@]}" -f deploy/compose.gpu.yaml)
"${gpu[@]}" --profile monitoring --profile example config -q
if [ ! -e /dev/nvidiactl ]; then
	refused 'could not select device driver "nvidia"' "${gpu[@]}" up -d --no-build dcpd
	up dcpd
fi

step "stopped: it ends well"
compose stop -t 30 dcpd >/dev/null 2>&1
[ "$(docker inspect -f '{{.State.ExitCode}}' "$(compose ps -aq dcpd)")" = 0 ]
step "all well"
