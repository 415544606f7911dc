#!/usr/bin/env bash
# Install this checkout on other machines over SSH, and check each of them.
#
# usage: scripts/bootstrap_node.sh [--dry-run] [--extras mlx|torch] [--pip-args "…"] [--hostfile FILE] HOST...
#
# On each host: Python 3.11 or newer is looked for, a virtual environment is made in ~/.local/share/exo-mesh-venv
# (EXO_MESH_DIR), a wheel of this checkout is installed there, `exo-mesh` is linked into ~/.local/bin, and
# `exo-mesh doctor` runs. Starting a node is yours: `exo-mesh`, or `exo-mesh service install`.
# EXO_MESH_SSH says how to reach a host. Running it again installs what has changed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

extras=
pip_args=
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    --extras) extras=${2?--extras needs a value} && shift ;;
    --pip-args) pip_args=${2?--pip-args needs a value} && shift ;;
    --hostfile) read_hosts "${2?--hostfile needs a file}" && shift ;;
    -h | --help) usage && exit ;;
    *) hosts+=("$1") ;;
    esac
    shift
done
need_hosts

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck disable=SC2086  # --pip-args is a list of words
run "${PYTHON:-python3}" -m pip wheel --quiet --disable-pip-version-check --no-deps $pip_args -w "$scratch" "$root"
wheel=exo_mesh.whl
for built in "$scratch"/*.whl; do
    [ ! -e "$built" ] || wheel=$(basename "$built")
done

install_on() { # HOST
    # shellcheck disable=SC2016  # the host expands these
    local find_python='for python in python3 python3.14 python3.13 python3.12 python3.11; do'
    # shellcheck disable=SC2016
    find_python+=' "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && break; python=; done;'
    # shellcheck disable=SC2016
    find_python+=' [ -n "$python" ] || { echo "no Python 3.11 or newer here" >&2; exit 1; };'
    local venv="\$HOME/$remote_dir" folder="\$HOME/$remote_dir.new" target
    target="$folder/$wheel"
    [ -z "$extras" ] || target="exo-mesh[$extras] @ file://$folder/$wheel"
    if [ -n "$dry_run" ]; then
        remote "$1" "mkdir -p \"$folder\" && cat >\"$folder/$wheel\""
    else
        remote "$1" "mkdir -p \"$folder\" && cat >\"$folder/$wheel\"" <"$scratch/$wheel"
    fi
    remote "$1" "set -e; trap 'rm -rf \"$folder\"' EXIT; $find_python \
[ -x \"$venv/bin/python\" ] || \"\$python\" -m venv \"$venv\"; \
pip() { \"$venv/bin/python\" -m pip install --quiet --disable-pip-version-check $pip_args \"\$@\"; }; \
pip --upgrade \"$target\"; pip --force-reinstall --no-deps \"$folder/$wheel\"; \
mkdir -p \"\$HOME/.local/bin\"; ln -sf \"$venv/bin/exo-mesh\" \"\$HOME/.local/bin/exo-mesh\"; exo-mesh version"
}

failed=()
for host in "${hosts[@]}"; do
    say "== $host"
    if install_on "$host"; then
        remote "$host" "exo-mesh doctor" || say "$host: exo-mesh doctor found something; what helps is below each finding"
    else
        failed+=("$host")
    fi
done
[ ${#failed[@]} -eq 0 ] || die "not installed on: ${failed[*]}"
