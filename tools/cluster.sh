#!/bin/bash
# A real Slurm with two nodes on this machine, for tests and for rehearsing a class.
#
#     sudo bash tools/cluster.sh up [FOLDER]      starts it, and says what to type next
#     sudo bash tools/cluster.sh down [FOLDER]    ends it and all of its jobs
#
# Each node has 64 CPUs, 600 GB and 8 GPUs, on paper only: its jobs run on the CPU. It is a
# network namespace with an address and a host name of its own, so what two nodes say to
# each other crosses a network. Everything lies in FOLDER. GPU_TYPE=mi250 types the GPUs,
# and NODES=3 makes three nodes.

set -euo pipefail
folder=${2:-/tmp/slurm-on-paper}
# Several clusters do not collide: each has the first number from here on that is free.
id=$(cat "$folder/id" 2> /dev/null || echo $(($(cksum <<< "$folder" | cut -d ' ' -f 1) % 250)))
while [[ ${1:-} == up ]] && ip link show "paper$id" &> /dev/null; do id=$(((id + 1) % 250)); done
nodes=$(seq "${NODES:-2}")
bridge=paper$id address=10.77.$id.1 ports=$((20000 + 4 * id))

fail() {
    echo "Error: $*" >&2
    exit 2
}

up() {
    local gpu n
    type munged slurmctld slurmd sbatch ip &> /dev/null || fail "no Slurm: type" \
        "sudo apt-get install slurm-wlm slurmd slurmctld munge iproute2"
    [[ ! -e $folder ]] || fail "$folder is there already: run bash $0 down $folder"
    echo "Starting a cluster on paper: some seconds, half a minute at most"
    mkdir -p "$folder"/{state,log}
    echo "$id" > "$folder/id"
    trap 'status=$?; tail -n 3 "$folder"/log/* >&2; down; exit $status' ERR
    chmod 755 "$folder"
    for gpu in {0..7}; do mknod "$folder/gpu$gpu" c 1 3; done # Slurm only counts these files
    sed 's/^ *//' > "$folder/slurm.conf" << END
        ClusterName=paper
        SlurmctldHost=$(hostname)($address)
        SlurmctldPort=$ports
        SlurmdPort=$((ports + 1))
        SlurmUser=root
        AuthInfo=socket=$folder/munge.socket
        StateSaveLocation=$folder/state
        SlurmdSpoolDir=$folder/%n
        SlurmctldPidFile=$folder/slurmctld.pid
        SlurmdPidFile=$folder/%n.pid
        SlurmctldLogFile=$folder/log/slurmctld
        SlurmdLogFile=$folder/log/%n
        SlurmdParameters=config_overrides
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        TaskProlog=$folder/prolog
        SelectType=select/cons_tres
        SelectTypeParameters=CR_CPU
        ReturnToService=2
        GresTypes=gpu
        NodeName=DEFAULT CPUs=64 RealMemory=600000 Gres=gpu:${GPU_TYPE:+$GPU_TYPE:}8
$(printf "NodeName=n%s NodeAddr=10.77.$id.1%s\n" $(for n in $nodes; do echo "$n $n"; done))
        PartitionName=gpu Nodes=ALL Default=YES
        PartitionName=other Nodes=ALL
END
    echo CgroupPlugin=cgroup/v1 > "$folder/cgroup.conf"
    echo "AutoDetect=off
Name=gpu ${GPU_TYPE:+Type=$GPU_TYPE }File=$folder/gpu[0-7]" > "$folder/gres.conf"
    # A GPU of this machine is not one of the cluster's.
    printf '%s\n' '#!/bin/sh' 'echo export CUDA_VISIBLE_DEVICES=' 'echo export HIP_VISIBLE_DEVICES=' \
        > "$folder/prolog"
    chmod +x "$folder/prolog"
    printf '%s\n' '127.0.0.1 localhost' "$address $(hostname)" > "$folder/hosts"
    for n in $nodes; do
        mkdir "$folder/n$n"
        echo "10.77.$id.1$n n$n" >> "$folder/hosts"
    done

    ip link add $bridge up type bridge
    ip address add $address/24 dev $bridge
    (umask 077 && head -c 1024 /dev/urandom > "$folder/munge.key")
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
        --pid-file="$folder/munged.pid" --seed-file="$folder/munge.seed" --log-file="$folder/log/munged"
    export SLURM_CONF=$folder/slurm.conf
    slurmctld
    for n in $nodes; do
        ip netns add $bridge-n$n
        ip link add $bridge-$n type veth peer name eth0 netns $bridge-n$n
        ip link set $bridge-$n master $bridge up
        ip -n $bridge-n$n address add 10.77.$id.1$n/24 dev eth0
        ip -n $bridge-n$n link set lo up
        ip -n $bridge-n$n link set eth0 up
        ip netns exec $bridge-n$n unshare --uts --mount sh -c \
            'mount --bind "$1/hosts" /etc/hosts && hostname $2 && exec slurmd -N $2' sh "$folder" n$n
    done
    timeout 30 bash -c \
        'until [[ $(sinfo --noheader --format=%T 2> /dev/null | sort -u) == idle ]]; do sleep 0.5; done'
    trap - ERR
    echo "The nodes are up. Type this, then sbatch and squeue as on a cluster:"
    echo "    export SLURM_CONF=$SLURM_CONF"
}

down() {
    local n pid file
    for n in /run/netns/"$bridge"-n*; do # a node's processes: slurmd, and the jobs there
        if [[ -e $n ]]; then
            ip netns pids "${n##*/}" | xargs --no-run-if-empty kill -9
            ip netns delete "${n##*/}"
        fi
    done
    for file in "$folder"/{slurmctld,munged}.pid; do
        if pid=$(cat "$file" 2> /dev/null) && kill "$pid" 2> /dev/null; then
            while [[ -e /proc/$pid ]]; do sleep 0.1; done
        fi
    done
    ip link delete $bridge 2> /dev/null || true
    rm -rf "$folder"
}

case ${1:-} in
    up | down) ((EUID == 0)) || fail "this needs root: run sudo bash $0 $1"; $1 ;;
    *) fail "run sudo bash $0 up, or down" ;;
esac
