#!/bin/bash
# debian.sh: makes a bare Debian 12 (minbase) once per user, and prints its folder. Tests take a copy of it. Needs root.
#
# debootstrap fetches 100 packages each time, which is most of what a test in a clean system costs. A month later it is made again.
# apt in there reaches the mirrors as this machine does: proxies, certificates, sources.
set -eu

[ "$(id -u)" -eq 0 ] || { echo "debian.sh: only root may make a system within this one" >&2; exit 1; }
root=${XDG_CACHE_HOME:-$HOME/.cache}/dcpd/debian-bookworm
mkdir -p "${root%/*}"
exec 9>"$root.lock"
flock 9
if [ -z "$(find "$root/.complete" -mtime -30 2>/dev/null)" ]; then
	"$(dirname "$0")/../deploy/deps.sh" debootstrap >&2
	mirror=$(apt-get indextargets --format '$(CODENAME) $(SITE)' 'Origin: Debian' | sed -n 's/^bookworm //p' | head -n 1)
	echo "debian.sh: debootstrap from ${mirror:=http://deb.debian.org/debian}" >&2
	rm -rf --one-file-system "$root"
	debootstrap --variant=minbase bookworm "$root" "$mirror" >"$root.log" 2>&1 || { tail "$root.log" >&2; exit 1; }
	rm "$root.log"
	rm -f "$root"/var/cache/apt/archives/*.deb
	apt-config dump Acquire | grep -E '^Acquire::(http|https|ftp|Retries|ForceIPv)' >"$root/etc/apt/apt.conf.d/99host" || true
	touch "$root/.complete"
fi
echo "$root"
