#!/usr/bin/env bash
# Stops the node of this machine; ends it if it does not stop, and its leftover processes.
#
# usage: scripts/stop_server.sh [--dry-run] [--home DIR] [--grace SECONDS] [--now] [--all]
#
# The node is asked first (`exo-mesh node stop`): its streams may finish within its --stop-grace. Processes left after
# --grace (45) get SIGTERM, and SIGKILL 10 s later. --now skips the request, for a node that hangs.
# --all ends every node and runner of this machine that this user may end. Stop a node that systemd or launchd started
# with `systemctl stop exo-mesh` or launchctl; otherwise they restart it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

home=${EXO_MESH_HOME:-}
grace=45
all=
now=
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    --home) home=${2?--home needs a directory} && shift ;;
    --grace) grace=${2?--grace needs seconds} && shift ;;
    --all) all=1 ;;
    --now) now=1 ;;
    -h | --help) usage && exit ;;
    *) die "unknown argument $1; see --help" ;;
    esac
    shift
done
if [ -n "$all" ]; then
    run exo_mesh node kill-all ${dry_run:+--dry-run}
    exit
fi
if [ -z "$home" ]; then
    home=$(exo_mesh config show --json | "$python" -c 'import json, sys; print(json.load(sys.stdin)["home"])')
fi
there() { [ "$(exo_mesh node processes --home "$home" --json)" != "[]" ]; }
if ! there; then
    say "no process uses the home $home"
    exit
fi
api=()
[ ! -r "$home/logs/server.url" ] || api=(--api-url "$(cat "$home/logs/server.url")")
if [ -z "$now" ] && run exo_mesh node stop --home "$home" ${api[@]+"${api[@]}"} && [ -z "$dry_run" ]; then
    end=$((SECONDS + grace))
    while there && [ "$SECONDS" -lt "$end" ]; do sleep 0.5; done
fi
if [ -n "$dry_run" ]; then
    exo_mesh node kill-all --home "$home" --dry-run
elif there; then
    exo_mesh node kill-all --home "$home" --grace "$((grace < 10 ? grace : 10))"
fi
