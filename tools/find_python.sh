#!/usr/bin/env bash
# Prints the path of a Python >= 3.12 that can make a virtual environment, or says in one sentence what to install.
#
#   $MOEJAX_PYTHON (if set, only that)  ->  PATH  ->  a pyenv root  ->  uv's own  ->  "install one like this", exit 1
#
# Every candidate is run, not only looked at: a pyenv shim exists for versions that are not switched on, Debian's
# python3 comes without ensurepip, and an old python3 is often first on PATH. 3.12 goes first, as the tests run on it.
set -euo pipefail
IFS=$'\n'     # paths may hold spaces

names=(python3.12 python3.13 python3.14 python3 python)

has_uv() { uv --version >/dev/null 2>&1; }

# Prints the interpreter's own path (not the shim's, nor a venv's), if it is new enough and venv works in it; uv needs no ensurepip.
try() {
    local need="venv, ensurepip"
    has_uv && need="venv"
    "$1" -c "
import sys
sys.exit('older than 3.12') if sys.version_info < (3, 12) else None
import $need
print(sys._base_executable)" 2>/dev/null </dev/null
}

if [ -n "${MOEJAX_PYTHON:-}" ]; then
    try "$MOEJAX_PYTHON" && exit 0
    echo "MOEJAX_PYTHON=$MOEJAX_PYTHON is not a Python >= 3.12 with venv and ensurepip: name another, or leave it unset." >&2
    exit 1
fi

for name in "${names[@]}"; do
    for candidate in $(type -ap "$name" 2>/dev/null || true); do
        try "$candidate" && exit 0
    done
done

root="$(pyenv root 2>/dev/null || true)"
for folder in "${PYENV_ROOT:-}" "$root" "$HOME/.pyenv"; do
    [ -n "$folder" ] || continue
    for minor in 12 13 14; do
        # Newest patch release first; free-threaded builds (3.13t) have no wheels of most packages.
        for candidate in $(printf '%s\n' "$folder"/versions/3."$minor".*/bin/python | sort -rV | grep -v 't/bin' || true); do
            [ -x "$candidate" ] && try "$candidate" && exit 0
        done
    done
done

if has_uv; then
    candidate="$(uv python find --no-python-downloads '>=3.12' 2>/dev/null || true)"
    [ -n "$candidate" ] && try "$candidate" && exit 0
fi

echo "moejax needs Python 3.12 or later with venv, and none was found on PATH, in a pyenv root or through uv: install" \
    "one (Debian 13, Ubuntu 24.04: apt-get install python3 python3-venv; elsewhere: uv python install 3.12, or pyenv" \
    "install 3.12), then call make again." >&2
exit 1
