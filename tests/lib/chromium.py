"""Debian's Chromium without a window: the headless shell takes half of the processor time that the whole browser does."""
import os

SHELL, WHOLE = "/usr/bin/chromium-headless-shell", "/usr/bin/chromium"
PATH = os.environ.get("CHROMIUM") or (WHOLE if os.path.exists(WHOLE) and not os.path.exists(SHELL) else SHELL)


def launch(playwright):
    return playwright.chromium.launch(executable_path=PATH, chromium_sandbox=False, args=["--process-per-site"])
