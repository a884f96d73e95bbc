#!/usr/bin/env bash
# A browser for the tests of report.html: quick where there is one, installed where we may, else those tests are skipped.
set -uo pipefail
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if [ "${CHROMIUM:-yes}" = no ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "note: no Chromium here, the tests of report.html in a browser are skipped. Try: apt-get install chromium" >&2
  exit 0
fi
echo "installing Chromium for the tests of report.html (make test CHROMIUM=no goes without) ..."
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install --yes --no-install-recommends chromium; } >"$log" 2>&1; then
  tail -n 5 "$log" >&2
  echo "note: Chromium could not be installed, the tests of report.html in a browser are skipped" >&2
fi
rm -f "$log"
exit 0
