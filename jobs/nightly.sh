#!/bin/sh
# Runs a job every night until it is done. For cron, in a crontab:
#
#   0 22 * * * /where/moebatch/is/jobs/nightly.sh /where/job.yaml
#
# The script prints nothing unless something fails, so cron has nothing to mail. It does nothing while
# the run of the night before is still active. It stops the run in the morning; moebatch keeps every row
# and every answer that has begun for the next night. When all rows are done the output is there, and
# later runs find nothing to do until you append rows to the input.
here=$(cd "$(dirname "$0")" && pwd)
job=${1:-$here/demo.yaml}
moebatch=${MOEBATCH:-$here/../.venv/bin/moebatch}
said=$("$moebatch" run "$job" --quiet --skip-if-locked --max-runtime "${MOEBATCH_RUNTIME:-8h}" 2>&1)
code=$?
# 75: the time is over and what is done is kept. Any other output is worth a mail.
[ "$code" -eq 75 ] && exit 0
[ -n "$said" ] && printf '%s\n' "$said" >&2
exit "$code"
