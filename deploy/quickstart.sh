#!/bin/bash
# quickstart.sh: dcpd's main job on real input, from nothing, in a scratch folder. `make quickstart` builds and calls it.
#
#   BIN=build/bin     where dcpd, dcpd-worker and dcpctl are
#   KEEP=1            leave dcpd running, to look at the dashboard; how to stop it is printed
#
# The checkpoint was written by PyTorch (FSDP model and Adam, 4 ranks); no PyTorch, Python or GPU is needed here.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${BIN:-build/bin}")
fill=$(realpath "${FILL:-build/test/release/tools/fill}")
scratch=$(mktemp -d "${TMPDIR:-/tmp}/dcpd-quickstart-XXXXXX")
export DCPD_URL=unix://$scratch/state/dcpd.sock
pid=

cleanup() {
	local status=$?
	if [ -n "$pid" ] && [ "${KEEP:-}" = 1 ] && [ $status -eq 0 ]; then
		return
	fi
	if [ -n "$pid" ]; then
		"$bin/dcpctl" rm shm:model >/dev/null 2>&1 || true
		"$bin/dcpctl" rm shm:big >/dev/null 2>&1 || true
		kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true
	fi
	[ $status -eq 0 ] || { echo "quickstart: failed; the daemon's last words:"; tail -n 20 "$scratch/log" 2>/dev/null; }
	rm -rf "$scratch"
}
trap cleanup EXIT

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { # prints a dcpctl command and what it says
	echo "\$ dcpctl $*"
	"$bin/dcpctl" "$@"
}
seconds() { # the time of a quiet command
	local start end
	start=$(date +%s.%N)
	"$@" >"$scratch/out" 2>&1 || { cat "$scratch/out" >&2; exit 1; }
	end=$(date +%s.%N)
	awk "BEGIN { printf \"%.2f\", $end - $start }"
}
rate() { awk "BEGIN { printf \"%.2f s, %.2f GB/s\", $2, $1 / $2 / 1e9 }"; }

say "Starting dcpd on $scratch"
mkdir -p "$scratch/ckpt" "$scratch/state"
chmod 700 "$scratch"
cp -r tests/fixtures/torch-2.15.0/fsdp2_adam/checkpoint "$scratch/ckpt/from-pytorch"
"$bin/dcpd" --state-dir "$scratch/state" --storage "main=$scratch/ckpt" --listen "unix:$scratch/state/dcpd.sock" \
	--listen 127.0.0.1:0 >"$scratch/log" 2>&1 &
pid=$!
for _ in $(seq 100); do
	"$bin/dcpctl" status >/dev/null 2>&1 && break
	kill -0 "$pid" 2>/dev/null || exit 1
	sleep 0.1
done
run status

say "A checkpoint that PyTorch wrote: FSDP model and Adam, 4 ranks"
run show main:from-pytorch
run load main:from-pytorch shm:model
run save shm:model main:saved
run reshard main:from-pytorch main:columns --world-size 2 --layout '*=Shard(1)@2'
run reshard main:from-pytorch main:hf --format safetensors
for c in from-pytorch saved columns; do
	run verify "main:$c"
done
for c in saved columns; do
	run diff main:from-pytorch "main:$c"
done
# safetensors has no place for values: those that were dropped are the only difference.
if "$bin/dcpctl" verify main:hf >"$scratch/verify" 2>&1; then
	run verify main:hf
	run diff main:from-pytorch main:hf --json >"$scratch/diff" || [ $? -eq 1 ]
	if grep -Eq '"what": ?"(values|dtype|shape|kind)"' "$scratch/diff"; then
		cat "$scratch/diff"
		exit 1
	fi
else
	grep -q format_unsupported "$scratch/verify" || { cat "$scratch/verify"; exit 1; }
	echo "main:hf: $(find "$scratch/ckpt/hf" -name '*.safetensors' | wc -l) safetensors files (this version writes them only)"
fi

free=$(df --output=avail -B1 /dev/shm | tail -1)
mib=256
[ "$free" -gt 1500000000 ] || mib=16
bytes=$((4 * mib * 1048576))
say "$((4 * mib)) MiB of random tensors over 4 ranks, so that speeds mean something"
"$fill" big 4 4 "$mib" >/dev/null
t_save=$(seconds "$bin/dcpctl" save shm:big main:big)
t_reshard=$(seconds "$bin/dcpctl" reshard main:big main:big-columns --world-size 2 --layout '*=Shard(1)@2')
t_verify=$(seconds "$bin/dcpctl" verify main:big-columns --level digest)
echo "save, shared memory to durable on disk   $(rate $bytes "$t_save")"
echo "reshard 4 ranks by rows, 2 by columns    $(rate $bytes "$t_reshard")"
echo "verify digests                           $(rate $bytes "$t_verify")"
run diff main:big main:big-columns

say "Done"
port=$(grep -oE '127\.0\.0\.1:[0-9]+' "$scratch/log" | grep -v ':0$' | head -1)
[ -n "$port" ]
echo "Dashboard: http://$port/#token=$(cat "$scratch/state/token")"
if [ "${KEEP:-}" = 1 ]; then
	"$bin/dcpctl" rm shm:big >/dev/null
	echo "dcpd goes on (process $pid). Stop it:  DCPD_URL=$DCPD_URL $bin/dcpctl rm shm:model; kill $pid; rm -r $scratch"
	echo "Try:  DCPD_URL=$DCPD_URL $bin/dcpctl ls main"
else
	echo "It stops now; KEEP=1 make quickstart leaves it running."
fi
