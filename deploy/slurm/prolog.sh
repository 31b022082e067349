#!/bin/bash
# prolog.sh: Slurm's Prolog= on a node with dcpd, as root. Without a dcpd that answers it fails: Slurm drains the node and queues the job
# again. It makes the file in which the job names its runs, one STORAGE:RUN a line, for epilog.sh:
#
#     echo main:run1 >> "/run/dcpd-slurm/$SLURM_JOB_ID"
#
# Slurm hands no environment to either script: DCPD_URL, RUNS_FOLDER, WAIT and PATH are read from the file `settings` beside them.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
settings=$(dirname "$0")/settings
set -a
[ ! -r "$settings" ] || . "$settings"
set +a
folder=${RUNS_FOLDER:-/run/dcpd-slurm}
[[ $SLURM_JOB_ID =~ ^[0-9]+$ ]]
dcpctl status --timeout 20s >/dev/null || { logger -t dcpd-prolog "job $SLURM_JOB_ID: no dcpd answers here"; exit 1; }
install -d -m 0755 "$folder"
install -m 0600 -o "$SLURM_JOB_UID" /dev/null "$folder/$SLURM_JOB_ID"
