#!/bin/sh
# deps.sh PACKAGE...: installs the Debian packages that are missing, and says so.
#
# Asking dpkg takes a few milliseconds, so every target may call this first; when nothing is missing it prints nothing and
# needs no rights and no network. Recommended packages are left out: a build machine needs the libraries, not their manuals.
set -eu

command -v dpkg-query >/dev/null || {
	echo "deps: this is not Debian; install what these packages hold: $*" >&2
	exit 1
}
missing=
for p in "$@"; do
	s=$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null || true)
	[ "$s" = installed ] || missing="$missing $p"
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" -ne 0 ]; then
	command -v sudo >/dev/null || {
		echo "deps: not root and no sudo; run as root: apt-get install$missing" >&2
		exit 1
	}
	as_root=sudo
fi
echo "deps: installing from Debian:$missing"
export DEBIAN_FRONTEND=noninteractive
# Lists as old as the image they came with name packages that are gone: fetch them first. A mirror that is slow, busy or just being
# updated is asked again; what is here already is not fetched twice.
install() {
	$as_root apt-get -q -o Acquire::Retries=3 update >/dev/null &&
		# shellcheck disable=SC2086
		$as_root apt-get -q -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 install \
			--no-install-recommends $missing >/dev/null
}
for pause in 5 30 0; do
	install && break
	[ "$pause" -ne 0 ] || exit 1
	echo "deps: that failed; once more in $pause s" >&2
	sleep "$pause"
done
echo "deps: done"
