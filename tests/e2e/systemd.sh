#!/bin/bash
# systemd.sh: the packages of `make deb` in a clean Debian 12 that systemd-nspawn boots: installed by apt, which starts the service; a user
# saves; the service is killed, hung, upgraded under load, started by its socket, stopped. Needs root. Exit 77: it cannot be booted here.
# The last line says how long it took from the packages to the first save.
set -eu
cd "$(dirname "$0")/../.."
command -v systemd-nspawn >/dev/null || { echo "skipped: no systemd-nspawn (Debian's systemd-container)"; exit 77; }
. tests/e2e/clean.sh
two_versions "$root/srv"
cp deploy/trainer.py "$root/srv/"
# All that comes from the network is fetched before it boots: it has a network of its own, with nothing in it.
inside apt-get -q update >/dev/null
{
	inside apt-get -q -y --no-install-recommends install systemd systemd-sysv &&
		inside sh -c 'apt-get -q -y -d --no-install-recommends install /srv/new/*.deb'
} >"$work/log" 2>&1 || fail "$(tail -5 "$work/log")"
inside useradd --create-home --home-dir /srv/alice alice
umount "$root/dev/shm" "$root/proc"

nspawn=(systemd-nspawn --quiet --directory "$root" --machine "dcpd-$$" --private-network --boot --console=pipe)
group=
if [ ! -d /run/systemd/system ]; then # no systemd here that would make a scope of it: a control group of its own
	nspawn+=(--register=no --keep-unit)
	group=/sys/fs/cgroup/systemd/dcpd-$$
	mkdir "$group" 2>/dev/null || group=
fi
(
	[ -z "$group" ] || echo $BASHPID >"$group/cgroup.procs"
	exec "${nspawn[@]}" </dev/null
) >"$work/console" 2>&1 &
pid=$!
leader=
end_of_container() {
	[ -z "$leader" ] || kill -s RTMIN+4 "$leader" 2>/dev/null || true # systemd powers off
	for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
	end
	wait "$pid" 2>/dev/null || true
	[ -z "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
}
trap end_of_container EXIT

environment=(PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C)
booted() { nsenter --target "$leader" --mount --uts --ipc --net --pid -- env -i "${environment[@]}" "$@"; }
alice() { booted setpriv --reuid alice --regid alice --init-groups --inh-caps=-all "$@"; }
step() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
until_true() { # WHAT COMMAND...
	local what=$1
	shift
	for _ in $(seq 300); do "$@" >/dev/null 2>&1 && return; sleep 0.2; done
	fail "$what: $(booted journalctl -u dcpd --no-pager -n 15 -o cat 2>/dev/null)"
}
shows() { booted systemctl show dcpd -P "$1"; }
is() { [ "$(shows "$1")" = "$2" ]; }
was_started_again() { is ActiveState active && [ "$(shows NRestarts)" -gt "$1" ]; }
packages() { # older|new
	booted sh -c "apt-get -q -y -o Dpkg::Use-Pty=0 --no-install-recommends install /srv/$1/*.deb" >"$work/log" 2>&1 ||
		fail "$(tail -5 "$work/log")"
}
runs() { # VERSION: of the daemon that answers
	local said
	said=$(booted python3 -c 'import dcpd; print(dcpd.connect().capabilities()["version"])')
	[ "$said" = "$1" ] || fail "a daemon of version $said answers, not of $1"
}
trainer() { alice python3 /srv/trainer.py --run r --mib 4 "$@"; }
holds() {
	local n
	for n in "$@"; do booted dcpctl verify "main:r/step-$n" --level digest >/dev/null || fail "step-$n does not verify"; done
}

has_leader() { leader=$(pgrep -P "$pid" -o) && booted systemctl is-system-running --wait; }
for _ in $(seq 100); do
	kill -0 "$pid" 2>/dev/null || { leader=; echo "skipped: systemd-nspawn does not boot here: $(tail -1 "$work/console")"; exit 77; }
	state=$(has_leader 2>/dev/null) || true
	[ "$state" != running ] || break
	sleep 0.2
done
leader=$(pgrep -P "$pid" -o)
[ "$state" = running ] || fail "it boots to '$state': $(booted systemctl --failed --no-pager)"

step "installed by apt: the service runs, and a user of its group saves"
began=$(date +%s%N)
packages older
installed=$((($(date +%s%N) - began) / 1000000))
is ActiveState active || fail "the service does not run: $(booted journalctl -u dcpd --no-pager -n 15 -o cat)"
booted usermod -aG dcpd alice
alice python3 -c 'import dcpd; dcpd.save({"lr": 0.1, "blob": bytes(100000)}, "main:run1/step-1")' || fail "no save"
took=$((($(date +%s%N) - began) / 1000000))
runs "$older"
is Type notify && is WatchdogUSec 1min || fail "not the unit of deploy/"
booted dcpctl verify main:run1/step-1 >/dev/null || fail "the first save does not verify"
booted dcpctl status

step "killed: systemd starts it again, and what was sealed is saved"
trainer --first 1 --steps 1 --seal-only
n=$(shows NRestarts)
booted systemctl kill --kill-whom=main -s KILL dcpd
until_true "not started again" was_started_again "$n"
trainer --first 1 --steps 1 --save-only
holds 1

step "hung: the watchdog ends it, and systemd starts it again"
booted install -D -m 644 /dev/stdin /run/systemd/system/dcpd.service.d/watchdog.conf <<<$'[Service]\nWatchdogSec=5\nTimeoutAbortSec=1'
booted systemctl daemon-reload
booted systemctl restart dcpd
n=$(shows NRestarts)
booted systemctl kill --kill-whom=main -s STOP dcpd
until_true "a hung daemon stays" was_started_again "$n"
booted rm -r /run/systemd/system/dcpd.service.d
booted systemctl daemon-reload
trainer --first 2 --steps 1
holds 1 2

step "upgraded to another version under load: what was being saved is saved, the configuration stays"
echo "keep-jobs = 99/1d" >>"$root/etc/dcpd/dcpd.conf"
alice python3 /srv/trainer.py --name load --run l --mib 32 --steps 1000 >/dev/null 2>&1 &
load=$!
until_true "no save" booted test -e /srv/checkpoints/l/step-1/.metadata
id=$(shows InvocationID)
packages new
runs "$version"
[ "$(shows InvocationID)" != "$id" ] || fail "the upgrade has not restarted the service"
booted sh -c 'kill $(pidof python3)' 2>/dev/null || true
wait "$load" 2>/dev/null || true
# A save that the old daemon had not begun may have failed with its trainer's connection.
booted dcpctl drain main:l --wait 60s >/dev/null || true
grep -q "keep-jobs = 99/1d" "$root/etc/dcpd/dcpd.conf" || fail "an upgrade lost the configuration"
for f in "$root"/srv/checkpoints/l/step-*; do
	booted dcpctl verify "main:l/${f##*/}" --level digest >/dev/null || fail "${f##*/} does not verify"
done
holds 1 2

step "stopped: it ends well, snapshots stay, and its socket starts it again"
trainer --first 3 --steps 1 --seal-only
booted systemctl stop dcpd
is Result success && is ExecMainStatus 0 || fail "it does not end well"
booted sh -c 'ls /dev/shm/dcpd-*' >/dev/null || fail "the snapshots went with the service"
booted systemctl enable -q --now dcpd.socket
is ActiveState inactive || fail "it runs without having been asked for"
trainer --first 3 --steps 1 --save-only
is ActiveState active || fail "the socket does not start it"
holds 1 2 3

step "purged: nothing of it runs, checkpoints stay"
booted apt-get -q -y purge dcpd libdcp0 libdcp-dev python3-dcpd >"$work/log" 2>&1 || fail "$(tail -3 "$work/log")"
is ActiveState inactive && is LoadState not-found || fail "the unit is still there"
[ -e "$root/srv/checkpoints/r/step-3/.metadata" ] || fail "purging took checkpoints"
echo "systemd.sh: installed in $installed ms, first save $took ms from the packages; killed, hung, upgraded, started by its socket, purged"
