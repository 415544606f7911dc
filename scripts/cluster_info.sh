#!/usr/bin/env bash
# Shows the nodes of a mesh side by side: version, health, engine, memory, peers, models.
#
# usage: scripts/cluster_info.sh [--dry-run] [--hostfile FILE] [HOST...] [URL...]
#
# A URL (http://studio-a:52415) is queried over HTTP, the node on a HOST over SSH. Without either all members
# that the node of this machine knows are queried. In a closed mesh EXO_MESH_API_KEY is sent.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

urls=()
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    --hostfile) read_hosts "${2?--hostfile needs a file}" && shift ;;
    -h | --help) usage && exit ;;
    http://* | https://*) urls+=("${1%/}") ;;
    -*) die "unknown flag $1; see --help" ;;
    *) hosts+=("$1") ;;
    esac
    shift
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ ${#urls[@]} -eq 0 ] && [ ${#hosts[@]} -eq 0 ]; then
    run exo_mesh status --json >"$scratch/own"
    [ -z "$dry_run" ] || { cat "$scratch/own" && exit; }
    while IFS= read -r url; do urls+=("$url"); done < <("$python" "$root/scripts/side_by_side.py" --urls "$scratch/own")
fi

number=0
ask() { # WHO COMMAND...: store the output of COMMAND
    local who=$1
    shift
    number=$((number + 1))
    if [ -n "$dry_run" ]; then
        "$@"
    elif ! "$@" >"$scratch/$number.json" 2>"$scratch/error" </dev/null; then
        say "$who: $(tail -1 "$scratch/error")"
        rm "$scratch/$number.json"
    fi
}
for host in ${hosts[@]+"${hosts[@]}"}; do
    ask "$host" remote "$host" "exo-mesh status --json"
done
for url in ${urls[@]+"${urls[@]}"}; do
    ask "$url" run exo_mesh status --json --api-url "$url"
done
[ -z "$dry_run" ] || exit 0
answers=()
for file in "$scratch"/*.json; do [ ! -e "$file" ] || answers+=("$file"); done
[ ${#answers[@]} -gt 0 ] || die "no node answered"
"$python" "$root/scripts/side_by_side.py" "${answers[@]}"
[ ${#answers[@]} -eq "$number" ] || die "$((number - ${#answers[@]})) of $number nodes did not answer"
