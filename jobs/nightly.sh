#!/bin/sh
# A job that takes more than one night, run by cron until it is done. In a crontab:
#
#   0 22 * * * /where/moebatch/is/jobs/nightly.sh /where/job.yaml
#
# It says nothing as long as nothing is wrong, so cron has nothing to mail; does nothing while the
# run of the day before is still at work; and stops in the morning, keeping every row and every
# begun answer for the next night. When all rows are done the output is there, and later runs find
# nothing to do until rows are appended to the input.
here=$(cd "$(dirname "$0")" && pwd)
job=${1:-$here/demo.yaml}
moebatch=${MOEBATCH:-$here/../.venv/bin/moebatch}
said=$("$moebatch" run "$job" --quiet --skip-if-locked --max-runtime "${MOEBATCH_RUNTIME:-8h}" 2>&1)
code=$?
# 75: time is over, what is done is kept. Everything else that is said is worth a mail.
[ "$code" -eq 75 ] && exit 0
[ -n "$said" ] && printf '%s\n' "$said" >&2
exit "$code"
