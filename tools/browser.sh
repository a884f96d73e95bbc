#!/usr/bin/env bash
# Installs Chromium for the tests of report.html if there is no browser yet and we may; otherwise those tests are skipped.
set -uo pipefail
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if [ "${CHROMIUM:-yes}" = no ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "note: no Chromium found, skipping the browser tests. Try: apt-get install chromium" >&2
  exit 0
fi
echo "installing Chromium for the tests of report.html (skip with make test CHROMIUM=no) ..."
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install --yes --no-install-recommends chromium; } >"$log" 2>&1; then
  tail -n 5 "$log" >&2
  echo "note: Chromium could not be installed, skipping the browser tests" >&2
fi
rm -f "$log"
exit 0
