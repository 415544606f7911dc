#!/usr/bin/env bash
# Measures tokens per second of a running mesh, or of nodes that it starts on this machine.
#
# usage: scripts/tps_bench.sh [--dry-run] [URL MODEL] [FLAGS of exo-mesh bench serve…]
#
#   scripts/tps_bench.sh http://127.0.0.1:52415 my-model           prompts of 32 and 512 tokens, 1 and 4 streams at once
#   scripts/tps_bench.sh --random 40M --compare single,group,ring  one node, a tensor group, a ring: the same load for each
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

flags=()
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    -h | --help) usage && exit ;;
    http://* | https://*) flags+=(--url "$1" --model "${2?a URL needs the name of a model after it}") && shift ;;
    *) flags+=("$1") ;;
    esac
    shift
done
run exo_mesh bench serve ${flags[@]+"${flags[@]}"}
