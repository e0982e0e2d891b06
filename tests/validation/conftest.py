"""What several files here need: the record of a claim, and a browser for pages."""

import shutil

import pytest

from validation import suite

LEVEL = 1e-8  # of each statement, about that of the suite, whatever number of claims it has


def run_claim(name, level="tiny", seed=0):
    """The record of a claim, run in this process."""
    claim = suite.claims()[name]
    tasks = enumerate(claim.tasks(level))
    results = [claim.run(suite.generator(seed, name, i), **task) for i, task in tasks]
    return suite.record(claim, claim.judge(results), LEVEL)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium from the system, without a window; nothing is downloaded."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver on this system")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        *("headless=new", "no-sandbox", "hide-scrollbars", "disable-gpu", "disable-quic"),
        *("disable-background-networking", "disable-component-update", "disable-sync"),
        *("no-first-run", "disable-dev-shm-usage"),
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def show(browser, path, width=1280, scheme="light", place=""):
    """Load a page and return what runs scripts on it."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for log in ("browser", "performance"):
        browser.get_log(log)  # empties it
    browser.get("about:blank")
    browser.get(path.as_uri() + place)
    return browser.execute_script
