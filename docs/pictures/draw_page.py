"""Draw page-wide.png, page-narrow.png and page-dark.png of a page that knows ns2d, burgers1d and swe2d, with Chromium.

ups export page ups-joint -o demo.html
python docs/pictures/draw_page.py file://$PWD/demo.html     (or the address of a server)
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.chromium import chromium

HERE = Path(__file__).parent
# name -> task, test state, shown step, width, height, dark
PICTURES = {
    "page-wide": ("ns2d", 0, 20, 1280, 900, False),
    "page-narrow": ("burgers1d", 2, 2, 390, 1040, False),
    "page-dark": ("swe2d", 0, 9, 1280, 1000, True),
}
BY_ID = "document.getElementById('{}')"


def draw(address: str) -> None:
    """One new browser for each picture."""
    for name, (task, state, step, width, height, dark) in PICTURES.items():
        with tempfile.TemporaryDirectory() as folder, chromium(Path(folder)) as browser:
            browser.window(width, height, dark=dark, phone=width < 400)
            browser.open(f"{address}#{task}")
            message = BY_ID.format("message") + ".textContent"
            browser.wait(f"{BY_ID.format('state')}?.options.length && !{message}", 300)
            for field, value in (("state", state), ("frame", step)):
                element = BY_ID.format(field)
                browser.run(f"{element}.value = {value}; {element}.dispatchEvent(new Event('change'))")
                if field == "state":
                    browser.run(BY_ID.format("finish") + ".click()")
                    browser.wait(f"/ steps in /.test({message})", 300)
            browser.run(f"{BY_ID.format('frame')}.oninput()")
            time.sleep(1)
            browser.picture(path := HERE / f"{name}.png")
            Image.open(path).convert("RGB").quantize(192).save(path, optimize=True)


if __name__ == "__main__":
    draw(sys.argv[1])
