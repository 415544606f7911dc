#!/usr/bin/env bash
# Tests the link between the ranks of a tensor group: doctor, bandwidth sweep, stress.
#
# usage: scripts/rdma_test.sh [--dry-run] [--hostfile FILE] [--ranks N] [--sizes 4K,64K,1M,16M] [--seconds S] [--no-stress]
#
# With --hostfile the sweep runs on those Macs through `mlx.launch`, which needs SSH between them and this checkout at the
# same path on each; the file sets the backend, such as jaccl over Thunderbolt 5. Without it N ranks (2) run on this
# machine over TCP: this tests that the collectives compute correctly, but not a cable.
# The stress (`python -m tools.bench group`) compares the answers of a group on this machine with those of one process.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

hostfile=
ranks=2
sizes=4K,64K,1M,16M
seconds=2
stress=1
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    --hostfile) hostfile=${2?--hostfile needs a file} && shift ;;
    --ranks) ranks=${2?--ranks needs a number} && shift ;;
    --sizes) sizes=${2?--sizes needs a list} && shift ;;
    --seconds) seconds=${2?--seconds needs a number} && shift ;;
    --no-stress) stress= ;;
    -h | --help) usage && exit ;;
    *) die "unknown argument $1; see --help" ;;
    esac
    shift
done

cd "$root"
run exo_mesh doctor rdma || say "exo-mesh doctor rdma found why RDMA does not work; a remedy is below each finding"
sweep=(tools.bench collectives --sizes "$sizes" --seconds "$seconds")
if [ -n "$hostfile" ]; then
    run exo_mesh hostfile "$hostfile"
    # converts the simple form to MLX's, with the backend written out
    converted=$(mktemp)
    trap 'rm -f "$converted"' EXIT
    exo_mesh hostfile "$hostfile" --json >"$converted"
    run mlx.launch --hostfile "$converted" -- "$python" -m "${sweep[@]}" --rank
else
    run "$python" -m "${sweep[@]}" --ranks "$ranks"
fi
[ -z "$stress" ] || run "$python" -m tools.bench group --ranks "$ranks"
