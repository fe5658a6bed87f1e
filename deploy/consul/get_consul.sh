#!/bin/bash
# get_consul.sh DIR [MIRROR]: puts a Consul binary at DIR/usr/bin/consul, for the tests and for trying the mesh out.
#
# It is consul 1.8.7 (MPL-2.0) from Debian 11 (bullseye), the last Debian that packages Consul, downloaded from the
# Debian mirror that this machine's apt uses (or MIRROR, a Debian archive's URL). The archive's signature is checked
# by apt and the package's digest here. Nothing on the system changes: apt runs on a configuration, lists and caches
# of its own inside DIR, and nothing is installed. Needs Debian on amd64 and no root; about 25 MB of download and
# 80 MB of disk, a few seconds. Running it again does nothing if the binary is there.
#
# Bullseye is no longer supported and will leave the mirrors one day; then, or on another system, put any Consul
# of 1.8 or later on PATH instead: the tests take that one. A production mesh should run a current Consul.
set -euo pipefail

readonly CONSUL_VERSION=1.8.7
readonly PACKAGE="consul=1.8.7+dfsg1-2+b3"
readonly SHA256=e4e888bba104daba1d9161f49bfc52649a7e4efd45b1a7ead5bc54f2cb9c89d9
readonly KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

fail() {
  echo "get_consul.sh: $1" >&2
  echo "get_consul.sh: Consul was not fetched; tests that need it are skipped. Any consul on PATH will do instead." >&2
  exit 1
}

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  echo "usage: get_consul.sh DIR [MIRROR]" >&2
  exit 2
fi

mkdir -p "$1" || fail "cannot create $1"
folder=$(cd "$1" && pwd)
binary=$folder/usr/bin/consul

version_of() { "$binary" version 2>/dev/null | head -n 1; }

if [ -x "$binary" ] && [ "$(version_of)" = "Consul v$CONSUL_VERSION" ]; then
  echo "Consul v$CONSUL_VERSION is already in $folder"
  exit 0
fi

for tool in apt-get dpkg dpkg-deb sha256sum; do
  command -v "$tool" >/dev/null || fail "$tool is missing: this way of getting Consul needs Debian"
done
[ "$(dpkg --print-architecture)" = amd64 ] || fail "the package is for amd64, this is $(dpkg --print-architecture)"
[ -r "$KEYRING" ] || fail "$KEYRING is missing: install the package debian-archive-keyring"

mirror=${2:-}
if [ -z "$mirror" ]; then
  # shellcheck disable=SC1091
  id=$(. /etc/os-release && echo "${ID:-}")
  # shellcheck disable=SC1091
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  [ "$id" = debian ] || fail "this system is not Debian; give the URL of a Debian archive as the second argument"
  # $(SITE) is apt's own placeholder.
  # shellcheck disable=SC2016
  mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' "Codename: $codename" | sort -u | head -n 1)
  [ -n "$mirror" ] || fail "apt knows no mirror for $codename; give the URL of a Debian archive as the second argument"
fi

work=$(mktemp -d "$folder/.apt.XXXXXX") || fail "cannot write to $folder"
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/root"
printf 'Types: deb\nURIs: %s\nSuites: bullseye\nComponents: main\nArchitectures: amd64\nSigned-By: %s\n' \
  "$mirror" "$KEYRING" >"$work/bullseye.sources"
# The sandbox user _apt could not write into the folder of whoever calls this.
printf '%s\n' \
  "Dir::Etc::sourcelist \"$work/bullseye.sources\";" \
  'Dir::Etc::sourceparts "/dev/null";' \
  "Dir::State::lists \"$work/lists\";" \
  "Dir::Cache \"$work/cache\";" \
  'APT::Sandbox::User "root";' \
  'Acquire::Retries "3";' \
  'Acquire::http::Timeout "30";' >"$work/apt.conf"
export APT_CONFIG=$work/apt.conf

# -o Error-Mode: without it an unreachable mirror is a mere warning.
apt-get -qq -o APT::Update::Error-Mode=any update ||
  fail "the package lists of bullseye could not be fetched; it may have left the mirror, or there is no network"
(cd "$work" && apt-get -qq download "$PACKAGE") || fail "$PACKAGE could not be fetched"
package=$(echo "$work"/consul_*.deb)
echo "$SHA256  $package" | sha256sum --check --quiet || fail "the package's digest is not the expected one"
dpkg-deb --extract "$package" "$work/root" || fail "the package could not be unpacked; is the disk full?"

mkdir -p "$folder/usr/bin"
mv -f "$work/root/usr/bin/consul" "$binary.new"
mv -f "$binary.new" "$binary"
[ "$(version_of)" = "Consul v$CONSUL_VERSION" ] || fail "$binary does not run on this system"
echo "Consul v$CONSUL_VERSION is in $folder"
