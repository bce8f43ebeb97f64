#!/usr/bin/env bash
# A run on the nodes of a Slurm job, which continues in the next job after a time limit or a preemption:
#   sbatch --nodes=2 --gpus-per-node=8 --time=12:00:00 slurm.sh /shared/runs/my-run my.toml cluster.toml
# The first word is the run directory, on storage that all nodes share. The others are words of `relax train`.
# Submit from a shell that finds `relax` and `ray` on its PATH, at the same path on every node.
# RELAX_HEAD_ADDRESS names the first node's address if its name resolves to a loopback address.
#SBATCH --job-name=relax
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@900
set -euo pipefail

run=${1:?usage: sbatch [options] slurm.sh RUN_DIR WORD... (words of relax train)}
shift
start_s=180

# Ray's settings for a run, and a token without which nobody can command the cluster.
export RAY_USAGE_STATS_ENABLED=0
export RAY_memory_monitor_refresh_ms=0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export RAY_SERVE_ENABLE_HA_PROXY=0
export RAY_SERVE_LOG_TO_STDERR=0
export RAY_DEDUP_LOGS=0
export RAY_worker_niceness=0
export RAY_SCHEDULER_EVENTS=0
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

# The batch script runs on the first node, which becomes the head. Jobs that share a node get different ports.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
ip=${RELAX_HEAD_ADDRESS:-$(getent ahostsv4 "$head" | awk 'NR == 1 { print $1 }' || true)}
case $ip in
    "" | 127.*)
        echo "slurm.sh: $head resolves to '$ip', which other nodes cannot reach; set RELAX_HEAD_ADDRESS" >&2
        exit 2
        ;;
esac
address=$ip:$((20000 + SLURM_JOB_ID % 10000))

# Each Ray node is a job step with all processors, memory and GPUs of its node.
ray_node() {
    local count=$1 where=$2
    shift 2
    srun "--nodes=$count" "--ntasks=$count" "$where" --overlap --mem=0 --cpu-bind=none \
        "--cpus-per-task=$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=0 \
        ray start --block "--num-gpus=${SLURM_GPUS_ON_NODE:-0}" "--object-store-memory=$((512 << 20))" "$@" &
}

steps=()
driver=
signals=0
sent=
end_steps() {
    [ ${#steps[@]} = 0 ] || kill "${steps[@]}" 2>/dev/null || true
    steps=()
    wait
}
# Send the signal to relax only, and only once: a second one would end the run without a checkpoint. Ray must live until
# the checkpoint is saved.
forward() {
    if [ -n "$driver" ] && [ -z "$sent" ]; then
        sent=1
        kill -TERM "$driver" 2>/dev/null || true
    fi
}
requeue() {
    echo "slurm.sh: job $SLURM_JOB_ID goes back to the queue, to continue $run" >&2
    end_steps
    scontrol requeue "$SLURM_JOB_ID"
    exit 130
}
trap end_steps EXIT
trap 'signals=$((signals + 1)); forward' TERM

ray_node 1 "--nodelist=$head" --head "--node-ip-address=$ip" "--port=${address##*:}" --include-dashboard=false \
    "--temp-dir=/tmp/ray-$SLURM_JOB_ID"
steps+=($!)
began=$SECONDS
until ray health-check --address "$address" >/dev/null 2>&1; do
    [ $signals = 0 ] || requeue
    if ! kill -0 "${steps[0]}" 2>/dev/null || [ $((SECONDS - began)) -gt $start_s ]; then
        echo "slurm.sh: Ray did not start on $head ($address); the output of its job step is above" >&2
        exit 4
    fi
    sleep 1
done
if [ ${#nodes[@]} -gt 1 ]; then
    ray_node $((${#nodes[@]} - 1)) "--exclude=$head" "--address=$address"
    steps+=($!)
fi

export RAY_ADDRESS=$address
relax train "$@" --runner ray --run-dir "$run" --resume &
driver=$!
[ $signals = 0 ] || forward
while true; do
    before=$signals
    code=0
    wait "$driver" || code=$?
    [ "$before" != "$signals" ] || break # else a signal ended the wait, and relax still saves
done

# Without a signal, exit code 130 means that a person stopped the run.
if [ -n "$sent" ] && [ "$code" = 130 ]; then
    requeue
fi
exit "$code"
