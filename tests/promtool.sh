#!/bin/bash
# promtool.sh: fetches promtool once per user, and prints its path.
#
# Debian has it in the package `prometheus`, which starts a server when it is installed: so the package is only unpacked.
set -eu

command -v promtool && exit 0
root=${XDG_CACHE_HOME:-$HOME/.cache}/dcpd/promtool
if [ ! -x "$root/promtool" ]; then
	mkdir -p "$root"
	exec 9>"$root/lock"
	flock 9
	if [ ! -x "$root/promtool" ]; then
		work=$(mktemp -d "$root/work.XXXXXX")
		trap 'rm -rf "$work"' EXIT
		(cd "$work" && apt-get -q download prometheus >&2 && dpkg-deb -x prometheus_*.deb .)
		mv "$work/usr/bin/promtool" "$root/promtool"
	fi
fi
echo "$root/promtool"
