# version.sh: programs that say they are of another version, for upgrades; for the scripts that read it.
version=$(cat VERSION)
older=${version//[0-9]/0}
newer=${version//[0-9]/9}
# Coordinator and worker compare their builds, so that two versions are as strange to each other as two releases. The names have one length.
as_version() { # VERSION: the script for sed that makes a program of this version one of that
	printf 's/(^|[^0-9.])%s([^0-9.]|$)/\\1%s\\2/g' "${version//./\\.}" "$1"
}
