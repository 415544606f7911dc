#!/bin/sh
# Installs exo-mesh for the user who runs this script: a virtual environment of its own in ~/.local/lib/exo-mesh and the
# command ~/.local/bin/exo-mesh. It needs no root and changes nothing else; run it again to update. docs/start/installation.md
# says what it chooses on each machine. POSIX sh: Debian's dash, Alpine's ash and macOS's sh run it.
set -eu

usage() {
    cat <<'TEXT'
usage: install.sh [--from SOURCE] [--extras LIST] [--lean] [--python PYTHON] [--prefix DIR] [--dry-run]
       install.sh --uninstall | --version | --help

  --from SOURCE    a checkout, a wheel or an sdist; by default the checkout that this script is part of
  --extras LIST    engines to install: mlx, torch, llamacpp, or none for NumPy only; by default those that suit this machine
  --lean           leave out transformers, which mlx-lm asks for and exo-mesh needs only to convert tokenizers of
                   older models; it is two fifths of the size. An update keeps this choice
  --python PYTHON  the interpreter to use, 3.11 or newer; by default the newest one found
  --prefix DIR     where lib/exo-mesh and bin/exo-mesh are made (~/.local)
  --upgrade-engines  replace installed engine libraries by newer ones, including those that you built or chose yourself
  --dry-run        print what would be done, and change nothing
  --uninstall      remove the environment and the command; models, settings and the node's identity are kept
  --version        print the installed version and its directory
TEXT
}

ENGINE_EXTRAS="mlx torch llamacpp"
OLDEST_PYTHON=3.11
OLDEST_GLIBC=2.35 # required by MLX's wheels for Linux
OLDEST_GLIBC_OF_ALL=2.31 # required by the wheels that every node needs
OLDEST_MACOS=14.0 # required by MLX's wheels for macOS
# Libraries that a user may have built for a GPU or chosen on purpose: installed versions are kept.
ENGINE_LIBRARIES="torch mlx mlx-lm mlx-cpu mlx-metal mlx-cuda mlx-cuda-12 mlx-cuda-13 llama-cpp-python xllamacpp"

say() { printf '%s\n' "$*"; }
fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

run() { # COMMAND...: run COMMAND, or with --dry-run print it
    if [ -n "$dry_run" ]; then
        printf 'would run:'
        for word in "$@"; do
            case $word in
            *[!A-Za-z0-9_./=:,+@%-]* | '') printf " '%s'" "$word" ;;
            *) printf ' %s' "$word" ;;
            esac
        done
        printf '\n'
    else
        "$@"
    fi
}

is_older() { # VERSION FLOOR: whether a version of numbers and dots is below another
    awk -v a="$1" -v b="$2" 'BEGIN {
        n = split(a, x, "."); m = split(b, y, ".")
        for (i = 1; i <= (n > m ? n : m); i++) if (x[i] + 0 != y[i] + 0) exit !(x[i] + 0 < y[i] + 0)
        exit 1
    }'
}

# --- this machine ----------------------------------------------------------------------------------------------------

glibc_version() { # empty if the C library is another one, such as musl
    found=$(getconf GNU_LIBC_VERSION 2>/dev/null) || return 0
    printf '%s' "${found#glibc }"
}

has_nvidia() { # the driver creates these files; the last one under WSL
    [ -e /dev/nvidiactl ] || [ -e /dev/nvidia0 ] || [ -e /dev/dxg ]
}

is_rk3588() { grep -qsa 'rockchip,rk3588' /proc/device-tree/compatible; }

choose_extras() { # sets `extras` and `why`, and prints notes about this machine
    system=$(uname -s) machine=$(uname -m)
    case $system in
    Darwin) choose_for_macos ;;
    Linux) choose_for_linux ;;
    *) fail "$system is not supported: exo-mesh runs on Linux and macOS" ;;
    esac
}

note_compilers() {
    say "note: not every library has a wheel for this machine; pip compiles the rest and needs a C and a Rust compiler"
}

choose_for_macos() {
    macos=$(sw_vers -productVersion)
    if [ "$machine" != arm64 ]; then
        extras=none why="MLX and PyTorch have no wheels for Intel Macs: the NumPy engine is used"
        note_compilers
    elif is_older "$macos" "$OLDEST_MACOS"; then
        extras=torch why="MLX has no wheel for macOS $macos (it needs $OLDEST_MACOS or newer): PyTorch is used"
    else
        extras=mlx why="Apple silicon, macOS $macos: MLX computes on the GPU"
    fi
}

choose_for_linux() {
    glibc=$(glibc_version)
    if [ -z "$glibc" ]; then
        extras=none why="this machine has no glibc, which the wheels of MLX and PyTorch need: the NumPy engine is used"
        note_compilers
    elif has_nvidia; then
        extras=torch why="an NVIDIA GPU: PyTorch computes on it"
    elif is_older "$glibc" "$OLDEST_GLIBC"; then
        extras=none why="MLX has no wheel for glibc $glibc (it needs $OLDEST_GLIBC or newer): the NumPy engine is used"
        if is_older "$glibc" "$OLDEST_GLIBC_OF_ALL"; then note_compilers; fi
        why="$why; --extras torch is faster"
    else
        case $machine in
        x86_64 | aarch64 | arm64) extras=mlx why="glibc $glibc, no NVIDIA GPU: MLX computes on the CPU; --extras torch is faster and takes gigabytes" ;;
        *)
            extras=none why="MLX has no wheel for $machine: the NumPy engine is used"
            note_compilers
            ;;
        esac
    fi
    [ ! -e /dev/kfd ] || say "note: an AMD GPU needs PyTorch's build for ROCm, see docs/start/installation.md"
    ! is_rk3588 || say "note: this is an RK3588. Its NPU is not used by this version: the engine computes on the CPU cores"
}

check_extras() { # --extras was given: fails with one sentence if it is not available here
    system=$(uname -s) glibc=
    if [ "$extras" != none ]; then
        for extra in $(printf '%s' "$extras" | tr ',' ' '); do
            case " $ENGINE_EXTRAS " in
            *" $extra "*) ;;
            *) fail "--extras $extra: unknown engine; choose from $ENGINE_EXTRAS, or none" ;;
            esac
        done
    fi
    [ "$system" != Linux ] || glibc=$(glibc_version)
    case ",$extras," in
    *,mlx,*)
        if [ "$system" = Linux ] && { [ -z "$glibc" ] || is_older "$glibc" "$OLDEST_GLIBC"; }; then
            [ -n "$glibc" ] && glibc="glibc $glibc" || glibc="a system without glibc"
            fail "MLX has no wheel for $glibc (it needs glibc $OLDEST_GLIBC or newer): use --extras torch, or --extras none for the NumPy engine"
        fi
        ;;
    esac
    why="as requested with --extras"
}

is_new_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() { # sets `python`
    if [ -n "$python" ]; then
        command -v "$python" >/dev/null || fail "$python: interpreter not found"
        is_new_python "$python" || fail "$python is $("$python" -V 2>&1); exo-mesh needs Python $OLDEST_PYTHON or newer"
        return
    fi
    for candidate in python3.14 python3.13 python3.12 python3.11 python3 python; do
        if command -v "$candidate" >/dev/null && is_new_python "$candidate"; then
            python=$(command -v "$candidate")
            return
        fi
    done
    old=$(python3 -V 2>/dev/null) || old="no Python"
    fail "found $old, but exo-mesh needs Python $OLDEST_PYTHON or newer: install it, or select it with --python"
}

# --- steps -------------------------------------------------------------------------------------------------------------

find_source() { # sets `source`
    if [ -z "$source" ]; then
        source=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
        grep -qs '^name = "exo-mesh"' "$source/pyproject.toml" || fail "nothing to install was given: use --from CHECKOUT or --from WHEEL"
    fi
    case $source in
    *.whl | *.tar.gz) [ -f "$source" ] || fail "$source: file not found" ;;
    *) [ -f "$source/pyproject.toml" ] || fail "$source is neither a checkout of exo-mesh, nor a wheel or sdist" ;;
    esac
    case $source in
    /*) ;;
    *) source=$PWD/$source ;;
    esac
}

check_ours() { # only a virtual environment is ever removed
    if [ -e "$environment" ] && [ ! -f "$environment/pyvenv.cfg" ]; then
        fail "$environment exists and is not a virtual environment: move it away, or use --prefix"
    fi
}

make_environment() { # keeps a working environment
    if [ -x "$environment/bin/python" ] && is_new_python "$environment/bin/python" && "$environment/bin/python" -m pip -V >/dev/null 2>&1; then
        is_new=
        return
    fi
    is_new=yes
    check_ours
    [ ! -e "$environment" ] || run rm -rf "$environment"
    run mkdir -p "$(dirname -- "$environment")"
    if ! run "$python" -m venv "$environment"; then
        rm -rf "$environment"
        fail "$python cannot create a virtual environment: install its venv package (Debian and Ubuntu: apt install python3-venv)"
    fi
}

installed_engine_libraries() { # NAME===VERSION per line
    # shellcheck disable=SC2086 # the names are words
    "$environment/bin/python" - $ENGINE_LIBRARIES <<'PYTHON'
import sys
from importlib import metadata

for name in sys.argv[1:]:
    try:
        print(f"{name}==={metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass
PYTHON
}

requirements() { # NAME EXTRA: what an installed distribution requires for an extra, or without any, one per line
    "$environment/bin/python" - "$1" "$2" <<'PYTHON'
import sys
from importlib import metadata

from pip._vendor.packaging.requirements import Requirement

name, extra = sys.argv[1:]
for text in metadata.requires(name) or ():
    one = Requirement(text)
    always = one.marker is None or one.marker.evaluate({"extra": ""})
    if always != bool(extra) and (always or one.marker.evaluate({"extra": extra})):
        one.marker = None
        print(str(one).replace(" ", ""))
PYTHON
}

is_lean() { # whether the installed MLX engine came without transformers
    "$environment/bin/python" -c 'import sys
from importlib.util import find_spec
sys.exit(find_spec("mlx_lm") is None or find_spec("transformers") is not None)'
}

install_lean() { # PIP-ARGUMENTS...: the extra mlx without the libraries for tokenizers that mlx-lm asks for
    pip="$environment/bin/python -m pip"
    library=mlx-lm
    if [ -z "$dry_run" ]; then library=$(requirements exo-mesh mlx | grep '^mlx-lm'); fi
    # shellcheck disable=SC2086 # pip is several words
    run $pip "$@" --no-deps "$library" || return
    if [ -n "$dry_run" ]; then
        say "would run: pip install what the extra mlx and mlx-lm require, but transformers and sentencepiece"
        return
    fi
    # shellcheck disable=SC2046,SC2086 # a word for each requirement
    $pip "$@" $({ requirements exo-mesh mlx; requirements mlx-lm ''; } | grep -v -e '^mlx-lm' -e '^transformers' -e '^sentencepiece')
}

install_package() {
    pip="$environment/bin/python -m pip"
    requirement=$source
    wanted=$extras
    if [ -z "$is_new" ] && [ -z "$dry_run" ] && is_lean; then lean=yes; fi
    case ",$extras," in
    *,mlx,*) [ -z "$lean" ] || wanted=$(printf '%s' ",$extras," | sed 's/,mlx,/,/; s/^,//; s/,$//') ;;
    *) lean='' ;;
    esac
    case $wanted in
    none | '') ;;
    *) requirement="${source}[$wanted]" ;;
    esac
    set -- install --disable-pip-version-check --no-input
    if [ -z "$is_new" ] && [ -z "$upgrade_engines" ]; then
        kept=$(installed_engine_libraries)
        if [ -n "$kept" ]; then
            say "keeping: $(printf '%s' "$kept" | tr '\n' ' ')"
            if [ -z "$dry_run" ]; then
                constraints=$(mktemp)
                trap 'rm -f "$constraints"' EXIT
                printf '%s\n' "$kept" >"$constraints"
            fi
            set -- "$@" --constraint "${constraints:-FILE}"
        fi
    fi
    [ -z "$upgrade_engines" ] || set -- "$@" --upgrade --upgrade-strategy eager
    # shellcheck disable=SC2086 # pip is two words
    if ! run $pip "$@" "$requirement" || { [ -n "$lean" ] && ! install_lean "$@"; }; then
        [ -z "$is_new" ] || rm -rf "$environment"
        fail "pip could not install $requirement, see above${constraints:+; if an installed engine library is too old, --upgrade-engines replaces it}"
    fi
    # pip does not install the version that it already sees: a checkout or a rebuilt wheel may have changed, and
    # PYTHONPATH may show it a copy that is not in this environment
    if [ -z "$is_new" ] || { [ -z "$dry_run" ] && [ ! -x "$environment/bin/exo-mesh" ]; }; then
        # shellcheck disable=SC2086
        run $pip install --disable-pip-version-check --no-input --no-deps --force-reinstall "$source"
    fi
}

link_command() {
    if [ -e "$command" ] && [ ! -L "$command" ]; then
        fail "$command exists and is not a link of this script: remove it, or use --prefix"
    fi
    run mkdir -p "$(dirname -- "$command")"
    run ln -sfn "$environment/bin/exo-mesh" "$command"
}

finish() {
    [ -z "$dry_run" ] || { say "nothing was changed"; return; }
    say "installed: $("$command" --version | head -n 1)"
    [ -n "$is_new" ] || say "a running node keeps the old version until you restart it"
    case ":$PATH:" in
    *":$(dirname -- "$command"):"*) say "next: exo-mesh demo" ;;
    *) say "next: $command demo    (or put $(dirname -- "$command") on your PATH)" ;;
    esac
}

uninstall() {
    if [ ! -e "$environment" ] && [ ! -L "$command" ]; then
        say "exo-mesh is not installed in $prefix"
        return
    fi
    check_ours
    [ ! -L "$command" ] || run rm -f "$command"
    run rm -rf "$environment"
    say "removed; models, settings and the node's identity are kept (exo-mesh config show prints their folder)"
}

show_version() {
    [ -x "$environment/bin/exo-mesh" ] || fail "exo-mesh is not installed in $prefix"
    say "$("$environment/bin/exo-mesh" --version | head -n 1), $environment"
}

# --- the command line -------------------------------------------------------------------------------------------------

value_of() { [ $# -ge 2 ] || fail "$1 needs a value"; }

prefix=${HOME:?HOME is not set}/.local
source='' extras='' lean='' python='' dry_run='' upgrade_engines='' action=install constraints=''
while [ $# -gt 0 ]; do
    case $1 in
    --from) value_of "$@"; source=$2; shift ;;
    --extras) value_of "$@"; extras=$2; shift ;;
    --lean) lean=yes ;;
    --python) value_of "$@"; python=$2; shift ;;
    --prefix) value_of "$@"; prefix=$2; shift ;;
    --upgrade-engines) upgrade_engines=yes ;;
    --dry-run) dry_run=yes ;;
    --uninstall) action=uninstall ;;
    --version) action=show_version ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown argument $1" ;;
    esac
    shift
done
case $prefix in
/*) ;;
*) prefix=$PWD/$prefix ;;
esac
environment=$prefix/lib/exo-mesh
command=$prefix/bin/exo-mesh

if [ "$action" != install ]; then
    "$action"
    exit 0
fi
find_source
find_python
if [ -n "$extras" ]; then check_extras; else choose_extras; fi
say "source: $source"
say "python: $python ($("$python" -V 2>&1))"
say "extras: $extras, $why"
make_environment
install_package
link_command
finish
