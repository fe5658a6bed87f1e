#!/bin/sh
# An authority and three certificates for compose.yaml, in identities/ beside this script. Needs `kvmesh` on PATH.
# For trying things: a real mesh keeps its authority off the machines that run nodes.
set -eu
cd "$(dirname "$0")"
mkdir -p identities
chmod 700 identities
kvmesh ca init --mesh demo --ca identities/ca
issue() {
    kvmesh ca issue --mesh demo --ca identities/ca --role "$1" --node-id "$2" --site "$3" --region eu-west \
        --jurisdiction "$4" --out "identities/$2" --dns "$5" --dns localhost --ip 127.0.0.1
}
issue placement placement-1 dc1 DE placement
issue core core-1 dc1 DE core-1
issue edge edge-paris paris FR edge-paris
# The containers' user.
if [ "$(id -u)" = 0 ]; then chown -R 10001 identities/placement-1 identities/core-1 identities/edge-paris; else
    echo "now, as root: chown -R 10001 deploy/compose/identities/*-1 deploy/compose/identities/edge-paris" >&2
fi
