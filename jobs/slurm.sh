#!/bin/sh
# The demo on a Slurm cluster: two shards as an array of tasks, then the merge. Slurm tells each task to
# stop before its ten minutes are over; the task keeps what it has and queues itself again.
#
#   sh slurm.sh                   all shards
#   sh slurm.sh --array=2         the second shard again, and the merge
set -eu
here=$(cd "$(dirname "$0")" && pwd)
moebatch=${MOEBATCH:-$here/../.venv/bin/moebatch}
"$moebatch" sbatch "$here/demo.yaml" --shards 2 --time 10 --cpus 1 -o "$here/demo.submit.sh"
sh "$here/demo.submit.sh" "$@"
