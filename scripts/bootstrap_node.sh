#!/usr/bin/env bash
# Installs this checkout on other machines over SSH, and checks each of them.
#
# usage: scripts/bootstrap_node.sh [--dry-run] [--extras mlx|torch|none] [--hostfile FILE] HOST...
#
# A wheel of this checkout and scripts/install.sh are sent to each host, and install.sh runs there: it finds Python
# 3.11, chooses the engine, and creates ~/.local/lib/exo-mesh and ~/.local/bin/exo-mesh. Then `exo-mesh doctor` runs.
# Start the node yourself: `exo-mesh`, or `exo-mesh service install`. EXO_MESH_SSH sets the command to reach a host.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

extras=
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    --extras) extras=${2?--extras needs a value} && shift ;;
    --hostfile) read_hosts "${2?--hostfile needs a file}" && shift ;;
    -h | --help) usage && exit ;;
    *) hosts+=("$1") ;;
    esac
    shift
done
need_hosts

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
run "${PYTHON:-$python}" -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$scratch" "$root"
cp "$root/scripts/install.sh" "$scratch"

install_on() { # HOST
    # shellcheck disable=SC2016  # the host expands it
    local folder='"$HOME/.cache/exo-mesh-bootstrap"' command
    command="rm -rf $folder; mkdir -p $folder && tar -xf - -C $folder && trap 'rm -rf $folder' EXIT"
    command+=" && sh $folder/install.sh --from $folder/*.whl ${extras:+--extras $extras} && exo-mesh version"
    if [ -n "$dry_run" ]; then
        remote "$1" "$command"
    else
        tar -cf - -C "$scratch" . | remote "$1" "$command"
    fi
}

failed=()
for host in "${hosts[@]}"; do
    say "== $host"
    if install_on "$host"; then
        remote "$host" "exo-mesh doctor" </dev/null ||
            say "$host: exo-mesh doctor reported problems; a remedy is below each"
    else
        failed+=("$host")
    fi
done
[ ${#failed[@]} -eq 0 ] || die "not installed on: ${failed[*]}"
