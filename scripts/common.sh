# shellcheck shell=bash
# Functions that the scripts of this folder share. Source it after `set -euo pipefail`. Works with macOS's bash 3.2.
#
# EXO_MESH      the exo-mesh command to use here (default: in .venv of this checkout if it exists, else in PATH)
# EXO_MESH_SSH  the command to reach a host (default: ssh with BatchMode and a time limit)

# shellcheck disable=SC2034  # the scripts use these variables
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dry_run=
hosts=()
read -r -a ssh_command <<<"${EXO_MESH_SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}"

say() { printf '%s\n' "$*" >&2; }

die() {
    say "$(basename "$0"): $*"
    exit 1
}

usage() { # print the comment at the top of the calling script
    sed -n '2,/^[^#]/p' "$0" | sed -n 's/^# \{0,1\}//p'
}

run() { # COMMAND...: run COMMAND; with --dry-run print it
    if [ -n "$dry_run" ]; then
        printf '+'
        printf ' %q' "$@"
        printf '\n'
    else
        "$@"
    fi
}

exo_mesh() { # run exo-mesh on this machine
    if [ -n "${EXO_MESH:-}" ]; then
        "$EXO_MESH" "$@"
    elif [ -x "$root/.venv/bin/exo-mesh" ]; then
        "$root/.venv/bin/exo-mesh" "$@"
    else
        exo-mesh "$@"
    fi
}

python=$root/.venv/bin/python
[ -x "$python" ] || python=$(command -v python3 || true)
[ -n "$python" ] || die "Python 3 is required; install it first"

remote() { # HOST COMMAND: run COMMAND in a shell of HOST, with exo-mesh in its PATH; standard input is forwarded
    # shellcheck disable=SC2016  # $HOME and $PATH are those of the host
    run "${ssh_command[@]}" "$1" 'export PATH="$HOME/.local/bin:$PATH"; '"$2"
}

read_hosts() { # FILE: append the ssh names of a hostfile; exo-mesh checks the file
    local listed
    listed=$(exo_mesh hostfile "$1" --json) || exit 1
    while IFS= read -r host; do
        hosts+=("$host")
    done < <("$python" -c 'import json, sys; [print(host["ssh"]) for host in json.load(sys.stdin)["hosts"]]' <<<"$listed")
}

need_hosts() {
    [ ${#hosts[@]} -gt 0 ] || die "name at least one host, or give --hostfile FILE"
    local host
    for host in "${hosts[@]}"; do
        case $host in -*) die "unknown flag $host; see --help" ;; esac
    done
}
