"""A headless Firefox driven by Marionette, the protocol that it speaks without a driver."""

import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

NULL = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
TAB = "\ue004"


def firefox():
    """The path of a Firefox on this machine."""
    return shutil.which("firefox-esr") or shutil.which("firefox")


class Page:
    """What a test asks of the page: commands of Marionette, each answered before the next."""

    def __init__(self, wire):
        self.wire, self.count = wire, 0
        self.read()  # who it is
        self.ask("WebDriver:NewSession", capabilities={})
        self.ask("WebDriver:SetTimeouts", script=60_000, pageLoad=60_000)

    def read(self):
        size = b""
        while not size.endswith(b":"):
            size += self.wire.recv(1)
        left, found = int(size[:-1]), b""
        while len(found) < left:
            found += self.wire.recv(left - len(found))
        return json.loads(found)

    def ask(self, name, **words):
        self.count += 1
        text = json.dumps([0, self.count, name, words])
        self.wire.sendall(f"{len(text)}:{text}".encode())
        _, _, error, answer = self.read()
        assert error is None, (name, error)
        return answer

    def goto(self, url):
        self.ask("WebDriver:Navigate", url=url)

    def evaluate(self, expression):
        return self.ask("WebDriver:ExecuteScript", script=f"return {expression}", args=[])["value"]

    def wait(self, expression, seconds=30):
        until = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < until, self.evaluate("document.body.innerText.slice(0, 2000)")
            time.sleep(0.1)

    def press(self, keys):
        pressed = [{"type": end, "value": key} for key in keys for end in ("keyDown", "keyUp")]
        self.ask(
            "WebDriver:PerformActions", actions=[{"type": "key", "id": "k", "actions": pressed}]
        )


@contextmanager
def opened(folder, patience=30):
    """A page of a Firefox whose profile is a new folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "user.js").write_text(f'user_pref("marionette.port", {port});\n')
    command = [firefox(), "--headless", "--marionette", "--no-remote", "--profile", str(folder)]
    process = subprocess.Popen(command, env=os.environ | {"HOME": str(folder)}, **NULL)
    try:
        until = time.monotonic() + patience
        while True:
            try:
                wire = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until and process.poll() is None, "Firefox did not start"
                time.sleep(0.1)
        with wire:
            yield Page(wire)
    finally:
        process.terminate()
        process.wait()
