"""The page of a profile's timeline, as a browser shows it: skipped where there is none."""

import shutil
import subprocess

import gpu_trace
import numpy as np
import pytest
from gpu_trace import FACTS, make_steps, to_planes

from jaxllm.profiling.report import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
COLOURS = {
    "light": {"mlp": "e8912d", "attention": "4a90e2", "paged_attention": "1f5fb0", "head": "3aa66a", "idle": "e5484d"},
    "dark": {"mlp": "f0a247", "attention": "5b9df0", "paged_attention": "3474cf", "head": "4fbf80", "idle": "ff6b6f"},
}
GROUNDS = {"light": "ffffff", "dark": "14171b"}
LANE, BAR = 30, 22
"""Heights, as in the page."""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    gpu_trace.write(folder, to_planes(*make_steps(calls=6)))
    FACTS.write(folder)
    return write_report(folder).timeline


def shoot(page, folder, fragment):
    """What the browser shows, uint8 [height, width, 3]."""
    image = pytest.importorskip("matplotlib.image")
    file = folder / "page.png"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,900"]
    command += [f"--user-data-dir={folder / 'browser'}", f"--screenshot={file}", f"{page.as_uri()}#{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert file.exists(), done.stderr
    return (image.imread(file)[:, :, :3] * 255).round().astype(np.uint8)


def pixels(shot, colour):
    """Bool [height, width]: where exactly this colour is."""
    return (shot == np.array([int(colour[at : at + 2], 16) for at in (0, 2, 4)])).all(-1)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("theme", COLOURS)
def test_the_timeline_has_the_colours_of_the_stages(page, tmp_path, theme):
    shot = shoot(page, tmp_path, f"theme={theme}")
    assert pixels(shot, GROUNDS[theme]).mean() > 0.5
    areas = {stage: pixels(shot, colour).sum() for stage, colour in COLOURS[theme].items()}
    assert all(area > 100 for area in areas.values()), areas
    # Stages stand beside each other for as long as they take: 330, 150 and 100 of 1000 us.
    assert areas["mlp"] / areas["head"] == pytest.approx(330 / 150, rel=0.35), areas
    assert areas["mlp"] / areas["paged_attention"] == pytest.approx(330 / 100, rel=0.35), areas


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_linked_view_shows_its_part(page, tmp_path):
    """From the middle of the second step's long kernel: nothing but it, from edge to edge."""
    shot = shoot(page, tmp_path, "theme=light&from=1700&to=1750")
    (rows,) = np.nonzero(pixels(shot, COLOURS["light"]["mlp"]).sum(1) > 700)
    assert BAR - 2 <= len(rows) <= BAR + 2 and rows.max() - rows.min() < LANE
    assert not pixels(shot, COLOURS["light"]["head"])[rows].any()
