#!/bin/bash
# retry.sh FLAKY-LIST PYTEST [ARGUMENT]...: runs pytest. With DCPD_RETRY=1 and five failures at most, those are run once more, in a new
# process; what passes then is added to the list, and counts as passed. More failures than that are no machine's fault.
set -u

list=$1
shift
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
failed="$cache/v/cache/lastfailed"
names() { sed -n 's/^ *"\(.*\)": true,\{0,1\}$/\1/p' "$failed" 2>/dev/null; }

"$@" -o cache_dir="$cache"
rc=$?
[ $rc -eq 1 ] && [ "${DCPD_RETRY:-}" = 1 ] || exit $rc
first=$(names)
[ -n "$first" ] && [ "$(wc -l <<<"$first")" -le 5 ] || exit $rc
echo "run once more: $first"
"$@" -o cache_dir="$cache" --lf || exit $?
mkdir -p "$(dirname "$list")"
sed 's/^/FLAKY /; s/$/: passed when run again/' <<<"$first" | tee -a "$list"
