#!/bin/sh
# Asks with curl: ./ask_curl.sh [URL MODEL]
set -eu
curl --fail-with-body --silent --show-error "${1:-http://127.0.0.1:52415}/v1/chat/completions" \
    -H 'Authorization: Bearer unused' -H 'Content-Type: application/json' \
    -d '{"model": "'"${2:-exo-mesh-demo}"'", "temperature": 0,
         "messages": [{"role": "user", "content": "Count from 7 to 12."}]}'
