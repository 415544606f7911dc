#!/usr/bin/env bash
# Installs this checkout into .venv, and prints what the machine can run.
#
# usage: scripts/setup.sh [--dry-run] [--extras mlx|torch|dev|…] [--venv DIR]
#
# For development in a checkout; scripts/install.sh installs exo-mesh for users. PYTHON sets the interpreter.
# Run it again to update.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

extras=dev
venv=$root/.venv
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    --extras) extras=${2?--extras needs a value} && shift ;;
    --venv) venv=${2?--venv needs a directory} && shift ;;
    -h | --help) usage && exit ;;
    *) die "unknown argument $1; see --help" ;;
    esac
    shift
done

chosen=${PYTHON:-python3}
"$chosen" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$chosen is missing or older than Python 3.11: set PYTHON to a newer interpreter"
[ -x "$venv/bin/python" ] || run "$chosen" -m venv "$venv"
target=$root
[ -z "$extras" ] || target="${root}[$extras]"
run "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$target"
run "$venv/bin/exo-mesh" version
run "$venv/bin/exo-mesh" engines
run "$venv/bin/exo-mesh" doctor || say "exo-mesh doctor reported problems; a remedy is below each"
