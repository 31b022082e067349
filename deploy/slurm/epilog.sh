#!/bin/bash
# epilog.sh: Slurm's Epilog= on a node with dcpd, as root: the node is free when the saves of the job's runs are durable. Where that takes
# longer than WAIT (or no dcpd answers) it fails, so that Slurm drains the node: snapshots stay in its memory until somebody has looked.
# A save that has failed is logged; no waiting mends it. Settings as prolog.sh says. PrologEpilogTimeout= must be longer than WAIT.
set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
settings=$(dirname "$0")/settings
set -a
[ ! -r "$settings" ] || . "$settings"
set +a
folder=${RUNS_FOLDER:-/run/dcpd-slurm} wait=${WAIT:-10m} rc=0
[[ $SLURM_JOB_ID =~ ^[0-9]+$ ]] || exit 1
file=$folder/$SLURM_JOB_ID
[ -f "$file" ] && [ ! -L "$file" ] || exit 0
say() { logger -t dcpd-epilog "job $SLURM_JOB_ID: $*"; }
# The job wrote these lines: whatever is no STORAGE:RUN is left alone, and of many only the first.
while IFS= read -r run; do
	[[ $run =~ ^[A-Za-z0-9_-]+:[^[:cntrl:]]+$ && $run != -* ]] || { say "a line that names no run"; continue; }
	dcpctl drain "$run" --wait "$wait" >/dev/null 2>&1
	case $? in
	0) ;;
	5) say "a save of $run has failed: dcpctl jobs --filter state=failed" ;;
	6) say "there is no run $run" ;;
	*) say "saves of $run are not durable yet: dcpctl drain $run"; rc=1 ;;
	esac
done < <(head -n 16 "$file" | cut -c -512)
[ $rc -ne 0 ] || rm -f "$file"
exit $rc
