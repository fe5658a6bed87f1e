#!/bin/sh
# Installs a kvmesh edge box from this folder. Uses no network. ./install.sh --help tells the options.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
for python in python3.14 python3.13 python3.12 python3.11 python3; do
    if command -v "$python" >/dev/null 2>&1 &&
        "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        if "$python" "$here/install.py" --fits "$here"; then
            exec "$python" "$here/install.py" "$@"
        fi
    fi
done
echo "install: no Python on this box fits the bundle (it has wheels for: $(sed -n '/"python"/,/]/s/.*"\(3\.[0-9]*\)".*/\1/p' "$here/manifest.json" | tr '\n' ' ')with the module venv); install one from the system's own medium" >&2
exit 1
