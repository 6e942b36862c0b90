#!/usr/bin/env bash
# Makes .venv in the repository root and installs EpiKV there with the named extras.
# Usage: scripts/setup.sh EXTRAS   (such as demo,test)
# Safe to run again, also after it was broken off; quick where nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:?"no extras named; say for example: scripts/setup.sh demo,test"}

# What the installed state depends on, its place among them: -e ties .venv to this folder.
stamp=.venv/epikv-$extras
state=$({ pwd; cat pyproject.toml scripts/setup.sh; } | cksum)
if [[ -f $stamp && $(<"$stamp") == "$state" ]] && .venv/bin/python -c ''; then
    exit
fi

# venv writes bin/activate last: without it, .venv is half made.
if [[ ! -f .venv/bin/activate ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    for python in python3.11 python3 ''; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            break
        fi
    done
    if [[ -z $python ]]; then
        echo "setup.sh: no Python 3.11 or newer as python3.11 or python3; install one" >&2
        exit 2
    fi
    "$python" -m venv --clear .venv
fi

# One release of torch, so that every machine runs the same.
rm -f "$stamp"
.venv/bin/python -m pip install torch==2.13.0 -e ".[$extras]"
echo "$state" >"$stamp"
