#!/usr/bin/env bash
# Make sure that a Chromium is on PATH, for the tests of `openrlhf view`: take the one that is there, or install Debian's.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo --non-interactive)
fi
install() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
}
# The list of packages of a fresh machine may be missing or old.
install 2>/dev/null || { "${as_root[@]}" apt-get update -qq && install; } || {
    echo "The tests of openrlhf view need Chromium, and apt-get could not install it." >&2
    echo "Try: install chromium or google-chrome yourself, then the same command again" >&2
    exit 1
}
