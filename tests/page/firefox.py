"""Firefox at the page, driven by its own protocol (Marionette), because Playwright drives only a Firefox of its own.

PAGE_FIREFOX names the browser; default: `firefox-esr` or `firefox` in the path.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli.client.child_node import free_port

FIREFOX = os.environ.get("PAGE_FIREFOX") or shutil.which("firefox-esr") or shutil.which("firefox")
START_S, ANSWER_S = 60.0, 90.0
needs_firefox = [
    pytest.mark.extended,
    pytest.mark.skipif(FIREFOX is None, reason="needs Firefox; PAGE_FIREFOX names it"),
]
HELPERS = """
const until = async (found) => {
  for (const end = performance.now() + 40000; performance.now() < end; await new Promise((go) => setTimeout(go, 30))) {
    const value = found();
    if (value) return value;
  }
  throw new Error(`in vain: ${found}`);
};
const all = (query) => [...document.querySelectorAll(query)], one = (query) => document.querySelector(query);
const named = (name) => one(`[aria-label="${name}"]`), button = (text) => all("button").find((found) => found.textContent === text);
const write = async (field, text) => {
  field.value = text;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  await new Promise(requestAnimationFrame);
  field.form.requestSubmit();
};
const view = async (name) => {
  location.hash = `#/${name}`;
  await until(() => one(`main.view-${name} :is(h1, h2)`));
};
const text = (query) => one(query)?.innerText ?? "";
const says = (query, words) => until(() => all(query).some((found) => found.innerText.includes(words)));
const click = async (query, words = "") => {
  const found = await until(() => all(query).find((one) => one.textContent.includes(words) && !one.disabled));
  found.dispatchEvent(new MouseEvent("click", { bubbles: true }));
};
const labelled = (words) => all("label").find((one) => one.innerText.startsWith(words))?.querySelector("input");
const fill = (field, value) => {
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
const newest = () => new Promise((found, failed) => {
  const opened = indexedDB.open("exo-mesh");
  opened.onerror = () => failed(opened.error);
  opened.onsuccess = () => {
    const asked = opened.result.transaction("conversations").objectStore("conversations").getAll();
    asked.onsuccess = () => { opened.result.close(); found(asked.result.sort((one, other) => other.updated - one.updated)[0]); };
  };
});
"""  # noqa: E501


class Firefox:
    """A running Firefox with one window."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._file, self._number = connection, connection.makefile("rb"), 0
        self._read()
        self.call("WebDriver:NewSession")
        self.call("WebDriver:SetTimeouts", script=int(1000 * ANSWER_S / 2))

    def call(self, name: str, **parameters: Any) -> Any:
        """Raises AssertionError with the message of the browser."""
        self._number += 1
        body = json.dumps([0, self._number, name, parameters]).encode()
        self._connection.sendall(b"%d:%s" % (len(body), body))
        _, number, error, result = self._read()
        assert number == self._number and error is None, error and error["message"]
        return result

    def run(self, script: str) -> Any:
        """What a script returns; it has HELPERS and may await."""
        whole = f"const end = arguments[0]; (async () => {{ {HELPERS} {script} }})().then((value) => end({{ value }}), (why) => end({{ why: String(why) }}))"  # noqa: E501
        found = self.call("WebDriver:ExecuteAsyncScript", script=whole, args=[])["value"]
        assert "why" not in found, found["why"]
        return found.get("value")

    def reopen(self, url: str) -> None:
        """Close the tab, and open the address in another one."""
        opened = self.call("WebDriver:NewWindow", type="tab")["handle"]
        self.call("WebDriver:CloseWindow")
        self.call("WebDriver:SwitchToWindow", handle=opened)
        self.call("WebDriver:Navigate", url=url)

    def _read(self) -> Any:
        length = b""
        while (byte := self._file.read(1)) not in (b":", b""):
            length += byte
        return json.loads(self._file.read(int(length)))


@contextmanager
def firefox_at(url: str, folder: Path) -> Iterator[Firefox]:
    """A Firefox at an address. folder: for its profile."""
    assert FIREFOX is not None
    port = free_port()
    settings = {"marionette.port": port, "intl.accept_languages": "en-US", "app.update.enabled": False}
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in settings.items()]
    (folder / "user.js").write_text("".join(lines))
    command = [FIREFOX, "--headless", "--marionette", "--no-remote", "--profile", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        browser = Firefox(_connected(port))
        browser.call("WebDriver:SetWindowRect", width=1280, height=900)
        browser.call("WebDriver:Navigate", url=url)
        yield browser
        with suppress(AssertionError, OSError, ValueError):
            browser.call("Marionette:Quit", flags=["eForceQuit"])
    finally:
        process.kill()
        process.wait(START_S)


def _connected(port: int) -> socket.socket:
    end = time.monotonic() + START_S
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), 1.0)
        except OSError:
            assert time.monotonic() < end, "Firefox does not listen"
            time.sleep(0.1)
            continue
        connection.settimeout(ANSWER_S)
        return connection
