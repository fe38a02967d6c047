# Shared by the batch scripts beside it: start the ranks of a job, pass signals on to them, and collect their logs.
#
# Every node runs one torchrun, which starts a rank per GPU of the node, or without GPUs as many ranks as
# --ntasks-per-node says. Ranks are numbered in the order of the job's nodes and meet on the first node.

PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
folder=$SLURM_JOB_NAME-$SLURM_JOB_ID                    # output of this job
logs=$folder/start-${SLURM_RESTART_COUNT:-0}            # logs of its ranks, of this start of the job
max_requeues=${RUNAHEAD_MAX_REQUEUES:-20}

signalled="" stopped="" near_limit=""
trap 'signalled=1 stopped=1 near_limit=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1   # not this script
trap 'signalled=1 stopped=1' TERM               # cancelled or preempted: SLURM signals the ranks too

say() {
    echo "runahead: $*" >&2
}

# run_ranks <module> [name=value ...]: runs the module on all ranks and returns their status. Standard output is that of
# rank 0. Afterwards $near_limit is 1 if the job was near its time limit.
run_ranks() {
    # Other nodes may not resolve the name that SLURM has for the node, so its address is used.
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_ADDR=${MASTER_ADDR:-$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')}
    MASTER_PORT=${MASTER_PORT:-$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
    # By it the ranks of several nodes know each other's messages.
    [ -n "$RUNAHEAD_SECRET_FILE" ] || RUNAHEAD_SECRET=${RUNAHEAD_SECRET:-$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')}
    export PYTHON MASTER_ADDR MASTER_PORT RUNAHEAD_SECRET logs
    export TASKS_PER_NODE=${SLURM_NTASKS_PER_NODE:-1}

    # torchrun and SLURM both wait 30 s by default between SIGTERM and SIGKILL (KillWait). With less, torchrun ends its
    # ranks before SLURM ends torchrun.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-15}
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${rank}: '

    mkdir -p "$logs" || return
    # One task per node, which gets all of the job's processors and GPUs there. After one task has ended, SLURM ends the
    # others within seconds, in which they report what they waited for.
    env -u SLURM_GPUS_PER_TASK -u SLURM_TRES_PER_TASK -u SLURM_CPUS_PER_TASK -u SRUN_CPUS_PER_TASK \
        srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
        --kill-on-bad-exit=0 --wait=15 bash -c '
            exec "$PYTHON" -m torch.distributed.run \
                --nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID" \
                --nproc-per-node="${SLURM_GPUS_ON_NODE:-$TASKS_PER_NODE}" \
                --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --rdzv-conf=timeout=300 \
                --log-dir="$logs/node-$SLURM_NODEID" --tee=2 -m "$@"' node "$@" </dev/null &
    local step=$! status
    wait "$step"
    status=$?
    while [ -n "$signalled" ]; do           # a signal ended the wait, not the ranks
        signalled=""
        wait "$step"
        status=$?
    done
    gather_logs
    if [ "$status" -ne 0 ] && [ -z "$stopped" ]; then
        say "ended with status $status; the log of each rank is in $logs"
        cat "$logs"/rank-*.err | grep '^\[rank ' | sort -u | head -n 20 | grep . >&2 || tail -n 1 "$logs/rank-0.err" >&2
    fi
    return "$status"
}

# torchrun keeps standard error as <node>/<random name>/attempt_0/<local rank>/stderr.log; here it becomes rank-<rank>.err.
gather_logs() {
    local rank=0 node local_rank log
    for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
        for ((local_rank = 0; ; local_rank++)); do
            log=$(echo "$logs/node-$node"/*/attempt_0/$local_rank/stderr.log)
            [ -f "$log" ] || break
            mv "$log" "$logs/rank-$rank.err"
            rank=$((rank + 1))
        done
        rm -rf "$logs/node-$node"
    done
}

# go_on_later: queues the job again, after the time limit ended a program that keeps its measurements.
go_on_later() {
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
        say "the time limit came near for the ${SLURM_RESTART_COUNT}th time; submit the job again to continue" \
            "(RUNAHEAD_MAX_REQUEUES=$max_requeues)"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        say "the time limit is near; the job is queued again and continues from what is kept"
    else
        say "the time limit is near, and the job cannot be queued again; submit it again to continue from what is kept"
    fi
}
