"""One streamed request, asked from the namespace of its node: run as a child process.

Reads the URL and the body as a JSON line from standard input, and writes a line `seconds text` for each piece of text.
"""

from __future__ import annotations

import http.client
import json
import sys
import time


def main() -> None:
    wish = json.loads(sys.stdin.readline())
    start = time.monotonic()
    connection = http.client.HTTPConnection(wish["host"], timeout=240)
    connection.request("POST", "/v1/completions", json.dumps(wish["body"]), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            text = "".join(choice.get("text", "") for choice in event.get("choices", ()))
            print(json.dumps({"at": time.monotonic() - start, "text": text, "error": event.get("error")}), flush=True)


if __name__ == "__main__":
    main()
