#!/bin/bash
# deb.sh: the packages of `make deb` in a clean Debian 12: installed, a save as the service's user, upgraded while dcpd runs,
# removed, purged. Needs root. The last line says how long it took from the packages to the first save.
set -eu
cd "$(dirname "$0")/../.."
. tests/e2e/clean.sh
mkdir -p "$root/debs"
cp build/deb/*.deb "$root/debs/"
rm -f "$root"/debs/*dbgsym*
packages() {
	inside sh -c 'apt-get -q -y -o Dpkg::Use-Pty=0 --no-install-recommends '"$1"' /debs/*.deb' >"$work/log" 2>&1 ||
		fail "$(tail -5 "$work/log")"
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
inside sh -c 'apt-get -q -y -d --no-install-recommends install /debs/*.deb' >/dev/null 2>&1 || fail "their dependencies cannot be fetched"
began=$(date +%s%N)
packages install
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
inside dcpctl verify main:run1/step-1 >/dev/null || fail "the first save does not verify"

# Upgraded (to itself) while it runs: the configuration that the operator changed stays, and what was saved.
echo "keep-jobs = 99/1d" >>"$root/etc/dcpd/dcpd.conf"
packages "install --reinstall"
grep -q "keep-jobs = 99/1d" "$root/etc/dcpd/dcpd.conf" || fail "an upgrade lost the configuration"
inside python3 -c 'import dcpd; dcpd.save({"lr": 0.2}, "main:run1/step-2")' || fail "no save while the programs are replaced"
stop
start
[ "$(inside dcpctl ls main --json | grep -c run1/step-)" -ge 1 ] || fail "the upgraded daemon lists nothing"
inside dcpctl verify main:run1/step-2 >/dev/null || fail "step-2 does not verify"

pc=/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)/pkgconfig/dcp.pc
inside test -e /usr/include/dcp.h -a -e "$pc" || fail "libdcp-dev lacks files"

stop
inside apt-get -q -y remove dcpd >"$work/log" 2>&1 || fail "$(tail -3 "$work/log")"
[ -e "$root/etc/dcpd/dcpd.conf" ] && [ -d "$root/var/lib/dcpd" ] || fail "removing is no purging"
inside apt-get -q -y purge dcpd libdcp0 libdcp-dev python3-dcpd >"$work/log" 2>&1 || fail "$(tail -3 "$work/log")"
[ ! -e "$root/etc/dcpd" ] && [ ! -e "$root/var/lib/dcpd" ] || fail "purging leaves the configuration or the journal"
[ -e "$root/srv/checkpoints/run1/step-1/.metadata" ] || fail "purging took checkpoints"
echo "deb.sh: installed, saved, upgraded, purged; from the packages to the first save: $took ms"
