#!/bin/bash
# engine.sh: fetches a container engine (dockerd, docker, compose, buildx) once per user, and prints its folder.
#
# The packages are Debian's and are only unpacked: installing them would start a server and change the packet filter. They are Debian 13's,
# because Debian 12's engine knows neither Compose's present files nor today's default seccomp profile, which refuses io_uring. runc is
# this Debian's own: it is the one program that needs the C library it was built with.
set -eu

root=${XDG_CACHE_HOME:-$HOME/.cache}/dcpd/engine-trixie
if [ ! -e "$root/.complete" ]; then
	mkdir -p "$root"
	exec 9>"$root/lock"
	flock 9
	if [ ! -e "$root/.complete" ]; then
		work=$(mktemp -d "$root/work.XXXXXX")
		trap 'rm -rf "$work"' EXIT
		mkdir -p "$work/lists/partial" "$work/archives/partial"
		mirror=$(apt-get indextargets --format '$(SITE)' 'Origin: Debian' | grep -v security | head -n 1)
		echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian} trixie main" >"$work/list"
		trixie=(-q -o "Dir::Etc::SourceList=$work/list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/lists"
			-o "Dir::Cache=$work" -o APT::Sandbox::User=root -o Acquire::Retries=3)
		{
			apt-get "${trixie[@]}" update
			cd "$work"
			apt-get "${trixie[@]}" download docker.io docker-cli containerd docker-compose docker-buildx tini
			apt-get -q -o APT::Sandbox::User=root -o Acquire::Retries=3 download runc
			for f in *.deb; do dpkg-deb -x "$f" x; done
		} >&2
		mkdir -p "$root/bin"
		mv x/usr/bin/{docker,ctr,containerd,containerd-shim-runc-v2} x/usr/sbin/{dockerd,docker-proxy,runc} "$root/bin/"
		mv x/usr/bin/tini-static "$root/bin/docker-init"
		mv x/usr/libexec/docker/cli-plugins "$root/cli-plugins"
		touch "$root/.complete"
	fi
fi
echo "$root"
