#!/usr/bin/env bash
# Checks what a node needs, starts it in the background, and waits until it is ready.
#
# usage: scripts/run_server.sh [--dry-run] [--home DIR] [--model NAME_OR_DIR] [--hostfile FILE] [-- FLAGS…]
#
# --model: a directory is checked for its files, and loaded when the node is ready; a name is loaded (--preload).
# --hostfile: checked, then passed to the node. FLAGS go to `exo-mesh serve`. The script refuses to start while a node with
# this home runs, or a leftover process of one: stop_server.sh ends both. The log is logs/server.log in the
# home. To start the node with the machine, use `exo-mesh service install`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

home=${EXO_MESH_HOME:-}
model=
flags=()
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    --home) home=${2?--home needs a directory} && shift ;;
    --model) model=${2?--model needs a name or a directory} && shift ;;
    --hostfile) run exo_mesh hostfile "${2?--hostfile needs a file}" && flags+=(--hostfile "$2") && shift ;;
    -h | --help) usage && exit ;;
    --) shift && flags+=("$@") && break ;;
    *) die "unknown argument $1; flags of the node come after --; see --help" ;;
    esac
    shift
done
if [ -z "$home" ]; then
    home=$(exo_mesh config show --json | "$python" -c 'import json, sys; print(json.load(sys.stdin)["home"])')
fi

if [ -d "$model" ]; then
    [ -f "$model/config.json" ] || die "$model is not a model directory: it has no config.json"
    compgen -G "$model/*.safetensors" >/dev/null || die "$model is not a model directory: it has no *.safetensors"
    [ -f "$model/tokenizer.json" ] || [ -f "$model/tokenizer.model" ] || die "$model has no tokenizer.json"
    model=$(cd "$model" && pwd)
    flags+=(--models-dir "$model")
fi
[ -z "$model" ] || flags+=(--preload "$(basename "$model")")
[ -d "$model" ] || [ -z "$model" ] || flags[${#flags[@]} - 1]=$model

stale=$(exo_mesh node processes --home "$home" --json)
if [ "$stale" != "[]" ]; then
    exo_mesh node processes --home "$home" >&2
    die "these processes use the home $home; scripts/stop_server.sh ends them"
fi
# an obstacle, such as a port in use, ends the script with the finding and its remedy
run exo_mesh doctor --home "$home" ${flags[@]+"${flags[@]}"} || die "exo-mesh doctor found why the node cannot start"

log=$home/logs/server.log
if [ -n "$dry_run" ]; then
    run exo_mesh serve --home "$home" ${flags[@]+"${flags[@]}"}
    exit
fi
umask 077
mkdir -p "$home/logs"
exo_mesh serve --home "$home" --log-format json ${flags[@]+"${flags[@]}"} </dev/null >"$log" 2>&1 &
server=$!
for _ in $(seq 600); do
    ready=$(grep -m1 '"event": "ready"' "$log" || true)
    [ -z "$ready" ] || break
    kill -0 "$server" 2>/dev/null || { tail -12 "$log" >&2 && die "the node ended; see its log $log"; }
    sleep 0.1
done
[ -n "$ready" ] || die "the node is not ready after 60 s; see its log $log"
url=$("$python" -c 'import json, sys; print(json.loads(sys.argv[1])["api_url"])' "$ready")
printf '%s\n' "$url" >"$home/logs/server.url"
say "ready: $url (process $server, log $log)"
