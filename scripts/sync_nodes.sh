#!/usr/bin/env bash
# Updates exo-mesh on other machines to the version of this checkout, one after the other.
#
# usage: scripts/sync_nodes.sh [--dry-run] [--check] [--force] [--no-restart] [--hostfile FILE] HOST...
#
# --check only compares versions and protocols (exit code 1 if any differs). Otherwise each host that differs is updated
# (scripts/bootstrap_node.sh), its node is drained and restarted, and the next host waits until this one is ready again:
# this is the rolling upgrade of docs/tasks/upgrade.md. --force also updates hosts with the same version, for changes in a
# checkout; --no-restart does not restart running nodes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

check=
force=
restart=1
pass=()
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 && pass+=("$1") ;;
    --check) check=1 ;;
    --force) force=1 ;;
    --no-restart) restart= ;;
    --extras) pass+=("$1" "${2?$1 needs a value}") && shift ;;
    --hostfile) read_hosts "${2?--hostfile needs a file}" && shift ;;
    -h | --help) usage && exit ;;
    *) hosts+=("$1") ;;
    esac
    shift
done
need_hosts

version_words='import json, sys; said = json.load(sys.stdin); print(said["exo-mesh"], "protocol", said["protocol"])'
words_of() { "$python" -c "$version_words" 2>/dev/null || echo "not installed"; }

# shellcheck disable=SC2016  # the host expands it
ready_again='for turn in $(seq 120); do exo-mesh status >/dev/null 2>&1 && exit 0; sleep 1; done; exit 1'
restart_on() { # HOST
    remote "$1" "exo-mesh status >/dev/null 2>&1" || { say "$1: no node runs there" && return; }
    remote "$1" "exo-mesh drain && exo-mesh node restart && sleep 1; $ready_again" ||
        die "$1 did not become ready again within 2 minutes; the hosts after it are unchanged"
}

here=$(exo_mesh version --json | words_of)
say "here: exo-mesh $here"
differing=()
for host in "${hosts[@]}"; do
    if [ -n "$dry_run" ]; then
        remote "$host" "exo-mesh version --json"
        there="unknown (--dry-run)"
    else
        there=$({ remote "$host" "exo-mesh version --json" </dev/null || true; } | words_of)
    fi
    printf '%-30s %s\n' "$host" "$there"
    [ "$there" = "$here" ] && [ -z "$force" ] || differing+=("$host")
done
[ ${#differing[@]} -gt 0 ] || { say "all hosts have the same version" && exit; }
[ -z "$check" ] || die "these hosts have another version: ${differing[*]}"
for host in "${differing[@]}"; do
    "$root/scripts/bootstrap_node.sh" ${pass[@]+"${pass[@]}"} "$host"
    [ -z "$restart" ] || restart_on "$host"
done
