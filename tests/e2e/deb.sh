#!/bin/bash
# deb.sh: the packages of `make deb` in a clean Debian 12: an older version installed, a save as the user of the service, upgraded while it
# runs, removed, purged. Needs root. The last line says how long it took from the packages to the first save.
set -eu
cd "$(dirname "$0")/../.."
. tests/e2e/clean.sh
two_versions "$root/debs"
packages() { # older|new
	inside sh -c 'apt-get -q -y -o Dpkg::Use-Pty=0 --no-install-recommends install /debs/'"$1"'/*.deb' >"$work/log" 2>&1 ||
		fail "$(tail -5 "$work/log")"
	[ "$(inside dcpd --version)" = "dcpd $2" ] || fail "installed $(inside dcpd --version), not $2"
}
runs() { # VERSION: of the daemon that answers
	local said
	said=$(curl -fsS --unix-socket "$root/run/dcpd/dcpd.sock" http://localhost/v1/capabilities |
		python3 -c 'import json, sys; print(json.load(sys.stdin)["version"])')
	[ "$said" = "$1" ] || fail "a daemon of version $said answers, not of $1"
}
stop() {
	kill "$pid"
	wait "$pid" || true
	pid=
}
start() {
	inside install -d -o dcpd -g dcpd /run/dcpd
	chroot "$root" setpriv --reuid dcpd --regid dcpd --init-groups dcpd --config /etc/dcpd/dcpd.conf >>"$work/dcpd.log" 2>&1 &
	pid=$!
	for _ in $(seq 100); do
		inside dcpctl status >/dev/null 2>&1 && return
		sleep 0.1
	done
	fail "dcpd does not start: $(tail -3 "$work/dcpd.log")"
}

# What the packages need is fetched before the clock runs.
inside apt-get -q update >/dev/null
inside sh -c 'apt-get -q -y -d --no-install-recommends install /debs/new/*.deb' >/dev/null 2>&1 ||
	fail "their dependencies cannot be fetched"
began=$(date +%s%N)
packages older "$older"
inside getent passwd dcpd >/dev/null || fail "there is no user dcpd"
[ "$(stat -c %u:%a "$root/srv/checkpoints")" = "$(inside id -u dcpd):750" ] || fail "/srv/checkpoints is not the service's"
wants=$root/etc/systemd/system
[ -L "$wants/multi-user.target.wants/dcpd.service" ] || fail "the service is not enabled"
[ -e "$root/lib/systemd/system/dcpd.socket" ] && [ ! -L "$wants/sockets.target.wants/dcpd.socket" ] ||
	fail "dcpd.socket is missing, or on without having been asked for"
sed -i 's/^listen = 127.0.0.1:8427$/listen = 127.0.0.1:0/' "$root/etc/dcpd/dcpd.conf" # the port may be taken here
start
inside python3 -c 'import dcpd; dcpd.save({"lr": 0.1, "blob": bytes(100000)}, "main:run1/step-1")' || fail "no save"
took=$((($(date +%s%N) - began) / 1000000))
runs "$older"
inside dcpctl verify main:run1/step-1 >/dev/null || fail "the first save does not verify"

# Upgraded while it runs: the configuration that the operator changed stays, and what was saved. The older daemon goes on until it is
# started again: it saves with the workers that it has, and refuses the new program in words.
echo "keep-jobs = 99/1d" >>"$root/etc/dcpd/dcpd.conf"
packages new "$version"
grep -q "keep-jobs = 99/1d" "$root/etc/dcpd/dcpd.conf" || fail "an upgrade lost the configuration"
runs "$older"
last=1
if inside python3 -c 'import dcpd; dcpd.save({"lr": 0.2}, "main:run1/step-2")' 2>"$work/save"; then
	last=2
else
	grep -q "of another build" "$work/save" || fail "no save while the programs are replaced, and why is not said: $(tail -3 "$work/save")"
fi
stop
start
runs "$version"
[ "$(inside dcpctl ls main --json | grep -c run1/step-)" -ge $last ] || fail "the upgraded daemon lists too little"
inside dcpctl verify main:run1/step-$last >/dev/null || fail "step-$last does not verify"
inside python3 -c 'import dcpd; dcpd.save({"lr": 0.3}, "main:run1/step-3")' || fail "the upgraded daemon does not save"
inside dcpctl verify main:run1/step-3 >/dev/null || fail "step-3 does not verify"

pc=/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)/pkgconfig/dcp.pc
inside test -e /usr/include/dcp.h -a -e "$pc" || fail "libdcp-dev lacks files"

stop
inside apt-get -q -y remove dcpd >"$work/log" 2>&1 || fail "$(tail -3 "$work/log")"
[ -e "$root/etc/dcpd/dcpd.conf" ] && [ -d "$root/var/lib/dcpd" ] || fail "removing is no purging"
inside apt-get -q -y purge dcpd libdcp0 libdcp-dev python3-dcpd >"$work/log" 2>&1 || fail "$(tail -3 "$work/log")"
[ ! -e "$root/etc/dcpd" ] && [ ! -e "$root/var/lib/dcpd" ] || fail "purging leaves the configuration or the journal"
[ -e "$root/srv/checkpoints/run1/step-1/.metadata" ] || fail "purging took checkpoints"
echo "deb.sh: installed, saved, upgraded, purged; from the packages to the first save: $took ms"
