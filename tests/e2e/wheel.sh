#!/bin/bash
# wheel.sh: the wheel of `make wheel` in a clean Debian 12 that has Python and none of dcpd's libraries: installed without network,
# a save and a load by a private daemon, as a user.
set -eu
cd "$(dirname "$0")/../.."
. tests/e2e/clean.sh
cp build/wheel/dcpd-*manylinux*.whl "$root/tmp/"
{ inside apt-get -q update && inside apt-get -q -y --no-install-recommends install python3 python3-venv; } >"$work/log" 2>&1 ||
	fail "$(tail -3 "$work/log")"
inside sh -c 'ls /usr/lib/*/libcurl* /usr/lib/*/libevent* /usr/lib/*/libmicrohttpd*' >/dev/null 2>&1 && fail "this system is not clean"
inside useradd --create-home --home-dir /srv/alice alice
as() {
	chroot "$root" setpriv --reuid alice --regid alice --clear-groups env -i HOME=/srv/alice PATH=/srv/alice/v/bin:/usr/bin:/bin "$@"
}
as python3 -m venv /srv/alice/v
as sh -c 'pip -q install --no-index /tmp/dcpd-*.whl' || fail "it does not install"
as python -m dcpd doctor || fail "the doctor finds something in the way"
as dcpd --version
as dcpctl --version
cat >"$root/tmp/use.py" <<'PY'
import dcpd
with dcpd.local("/srv/alice/checkpoints", idle_seconds=1):
    dcpd.save({"lr": 0.5, "blob": bytes(range(256)) * 400}, "main:run1/step-1")
    found = dcpd.load("main:run1/step-1")
    assert found == {"lr": 0.5, "blob": bytes(range(256)) * 400}, found
PY
as python /tmp/use.py || fail "no save and load"
[ -e "$root/srv/alice/checkpoints/run1/step-1/.metadata" ] || fail "no checkpoint"
for _ in $(seq 100); do # the private daemon ends by itself
	find /proc -maxdepth 2 -path '/proc/[0-9]*/root' -lname "$root" 2>/dev/null | grep -q . || break
	sleep 0.1
done
echo "wheel.sh: $(cd "$root/tmp" && ls dcpd-*.whl) installed by itself, saved, loaded"
