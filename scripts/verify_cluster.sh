#!/usr/bin/env bash
# Checks the machines of a mesh: reachable, same version, no doctor findings, and one view on all nodes.
#
# usage: scripts/verify_cluster.sh [--dry-run] [--rdma] [--hostfile FILE] [HOST...] [URL...]
#
# A HOST is checked over SSH: `exo-mesh version` and `exo-mesh doctor`, with --rdma also `exo-mesh doctor rdma`.
# A URL (http://studio-a:52415) is checked over HTTP: /healthz, /readyz, and the digest of its view, which is equal on all
# nodes of one mesh. In a closed mesh EXO_MESH_API_KEY is sent. The exit code is 1 if a check fails.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

rdma=
urls=()
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    --rdma) rdma=1 ;;
    --hostfile) read_hosts "${2?--hostfile needs a file}" && shift ;;
    -h | --help) usage && exit ;;
    http://* | https://*) urls+=("${1%/}") ;;
    *) hosts+=("$1") ;;
    esac
    shift
done
[ ${#urls[@]} -gt 0 ] || need_hosts

wrong=0
verdict() { # WHO WHAT COMMAND...: run COMMAND quietly; its output is shown if it fails
    local who=$1 what=$2 said
    shift 2
    if [ -n "$dry_run" ]; then
        "$@"
    elif said=$("$@" 2>&1 </dev/null); then
        printf 'ok    %-30s %s\n' "$who" "$what"
    else
        wrong=$((wrong + 1))
        printf 'FAIL  %-30s %s\n' "$who" "$what"
        printf '%s\n' "$said" | sed 's/^/        /'
    fi
}

for host in ${hosts[@]+"${hosts[@]}"}; do
    verdict "$host" "reachable over SSH" remote "$host" true
    verdict "$host" "exo-mesh installed" remote "$host" "exo-mesh version"
    verdict "$host" "exo-mesh doctor" remote "$host" "exo-mesh doctor"
    [ -z "$rdma" ] || verdict "$host" "exo-mesh doctor rdma" remote "$host" "exo-mesh doctor rdma"
done
[ ${#hosts[@]} -lt 2 ] || verdict "all hosts" "same version" "$root/scripts/sync_nodes.sh" --check "${hosts[@]}"

digest_of() { # URL
    exo_mesh status --json --api-url "$1" |
        "$python" -c 'import json, sys; print(json.load(sys.stdin)["view"]["view_digest"])'
}
answers() { # URL
    "$python" -c 'import sys, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=10).read()' "$1"
}
for url in ${urls[@]+"${urls[@]}"}; do
    verdict "$url" "lives (/healthz)" run answers "$url/healthz"
    verdict "$url" "ready (/readyz)" run answers "$url/readyz"
done
one_view() { # the view may change while it is read: try up to five times
    local turn url digests
    for turn in 1 2 3 4 5; do
        digests=
        for url in "${urls[@]}"; do digests+="$(digest_of "$url")"$'\n' || return; done
        [ "$(printf %s "$digests" | sort -u | wc -l)" -ne 1 ] || return 0
        sleep "$turn"
    done
    printf '%s' "$digests"
    return 1
}
[ ${#urls[@]} -lt 2 ] || verdict "all nodes" "one view of the mesh" run one_view
[ "$wrong" -eq 0 ] || die "$wrong checks failed"
