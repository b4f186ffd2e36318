#!/usr/bin/env bash
# One pod of a target that spans nodes; LeaderWorkerSet starts the pods and says who is who.
#
#   node.sh worker                 waits for ranks: an SSH server of this user
#   node.sh leader RECIPE ROOT     waits for the workers, then launch.sh
#
# Environment: MASW_SSH, a folder with the files id_ed25519 and id_ed25519.pub, the same in all pods;
# MASW_SSH_PORT (2222); leader: MASW_GPUS, GPUs of each pod; LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, of
# LeaderWorkerSet; MASW_WORKER_SECONDS (600) until every worker answers.
# Exit code: launch.sh's; 69 when a worker did not answer, with its name.
set -euo pipefail

port=${MASW_SSH_PORT:-2222}
ssh_home=$HOME/.ssh
say() { echo "masw-node: $*" >&2; }

prepare_keys() {
    mkdir -p "$ssh_home"
    chmod 700 "$ssh_home"
    install -m 600 "$MASW_SSH/id_ed25519" "$ssh_home/id_ed25519"
    install -m 600 "$MASW_SSH/id_ed25519.pub" "$ssh_home/authorized_keys"
    # only the own group's pods are spoken to, and they are all made with this key
    printf 'Host *\n Port %s\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n%s\n' \
        "$port" " LogLevel ERROR" >"$ssh_home/config"
    chmod 600 "$ssh_home/config"
}

# Ranks that arrive over SSH see the container's variables.
keep_environment() {
    env | grep -E '^(PATH|LD_[A-Z_]*|CUDA_[A-Z_]*|NVIDIA_[A-Z_]*|NCCL_[A-Z_]*|OPAL_PREFIX|PYTHON[A-Z]*)=' \
        >"$ssh_home/environment" || true
}

worker() {
    keep_environment
    cat >"$ssh_home/sshd_config" <<CONFIG
Port $port
HostKey $ssh_home/id_ed25519
AuthorizedKeysFile $ssh_home/authorized_keys
PidFile $ssh_home/sshd.pid
PasswordAuthentication no
PermitUserEnvironment yes
StrictModes no
UsePAM no
CONFIG
    exec /usr/sbin/sshd -D -e -f "$ssh_home/sshd_config"
}

# NAME.SUBDOMAIN… of the leader; worker i is NAME-i.SUBDOMAIN…
hosts() {
    local name=${LWS_LEADER_ADDRESS%%.*} domain=${LWS_LEADER_ADDRESS#*.} i
    echo "$LWS_LEADER_ADDRESS"
    for ((i = 1; i < LWS_GROUP_SIZE; i++)); do echo "$name-$i.$domain"; done
}

await_workers() {
    local host deadline=$((SECONDS + ${MASW_WORKER_SECONDS:-600}))
    for host in $(hosts | tail -n +2); do
        until ssh -n -o ConnectTimeout=5 "$host" true; do
            if ((SECONDS >= deadline)); then
                say "worker $host does not answer on port $port"
                exit 69
            fi
            sleep 2
        done
    done
}

leader() {
    hosts | sed "s/$/ slots=$MASW_GPUS/" >"$ssh_home/hostfile"
    await_workers
    export OMPI_MCA_orte_default_hostfile=$ssh_home/hostfile
    exec "$(dirname "$(readlink -f "$0")")/launch.sh" "$@"
}

role=${1:-}
prepare_keys
case $role in
    worker) worker ;;
    leader) leader "${@:2}" ;;
    *) say "usage: node.sh worker | node.sh leader RECIPE ROOT"; exit 2 ;;
esac
