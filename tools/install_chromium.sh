#!/usr/bin/env bash
# Installs Chromium as Debian's package where that needs no question: as root, with apt-get. Elsewhere it says why not;
# tests of pages are skipped without it.
set -euo pipefail
for name in chromium-headless-shell chromium chromium-browser google-chrome chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
without() {
  echo "without Chromium: $1; tests that look at pages are skipped" >&2
  exit 1
}
[ "$(uname)" = Linux ] && command -v apt-get >/dev/null || without "install it as your system does"
[ "$(id -u)" = 0 ] || without "install it with: sudo apt-get install chromium-headless-shell"
export DEBIAN_FRONTEND=noninteractive
package=chromium-headless-shell
{ apt-cache show "$package" || apt-get -qq update; } >/dev/null 2>&1 || true
timeout 180 apt-get -qq install --yes --no-install-recommends "$package" >/dev/null 2>&1 ||
  without "apt-get install $package failed"
