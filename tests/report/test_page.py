"""The page of a report: its size, its costs as Python computes them, and how it behaves in a real browser."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from lamina.base.errors import MissingExtra
from lamina.report import build, figures, page, save, tables
from run_folders import EVIL, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and shutil.which("chromedriver")), reason="no chromium and chromedriver on this machine"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SIZE_LIMIT = 6e6
LOAD_LIMIT = 2000  # ms, from the click to the drawn figure


@pytest.fixture(scope="module")
def comparison_folder(tmp_path_factory):
    """Five algorithms, three seeds, 100 rounds, and rates tried with one of them; one algorithm's name is hostile."""
    folder = tmp_path_factory.mktemp("comparison")
    noise = np.random.default_rng(0)
    for i, name in enumerate(["fedavg", "fedams", "fedlamb", "fedlada", EVIL]):
        for seed in range(3):
            rising = 0.95 - 0.8 * np.exp(-np.arange(100) / (10 + 5 * i)) + noise.normal(0, 0.01, 100)
            write_run(folder / str(i) / f"seed{seed}", rising.clip(0, 1).tolist(), algorithm=name, seed=seed)
    for lr in (0.01, 0.1, 1.0):
        tuned = folder / "tuning" / "fedavg" / f"lr{lr}"
        write_run(tuned, [0.2, 0.5 + 0.3 * lr], lr=lr, data={"validation": 0.2})
    return folder


@pytest.fixture(scope="module")
def report(comparison_folder):
    return build.build([comparison_folder])


@pytest.fixture(scope="module")
def page_file(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    save.save_page(report, path)
    return path


def test_the_page_is_small_enough(page_file):
    assert page_file.stat().st_size < SIZE_LIMIT


def test_long_runs_are_thinned_for_drawing_only(tmp_path):
    for name in ("fedavg", "fedlamb"):
        rising = np.linspace(0, 1, 4000)
        write_run(tmp_path / name, [a if i % 10 == 9 else None for i, a in enumerate(rising.tolist())], algorithm=name)
    report = build.build([tmp_path])
    (curve, _) = page.page_data(report)["curves"]
    assert curve["rounds"][-1] == 4000
    assert len(curve["rounds"]) == 400
    assert None not in curve["columns"]["accuracy"][0]  # only rounds that were evaluated
    assert len(curve["steps"][0]) == 400  # every record, for the table


def open_browser(profile):
    """A new browser, which has nothing cached."""
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(20)
    return driver


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = open_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, page_file):
    """The page, freshly opened from disk on a desktop in light colours."""
    resize(browser, 1200)
    prefer(browser, "light")
    browser.get(page_file.as_uri())
    browser.execute_script("localStorage.clear()")
    wait_for(browser, "document.querySelector('#partition-plot .main-svg')")
    yield browser
    severe = [line["message"] for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    assert severe == []


def resize(browser, width, mobile=False):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(browser, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait_for(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10).until(lambda b: b.execute_script(f"return {condition}"))


def texts(browser, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return browser.execute_script(script, selector)


def choose(browser, control, value):
    """Set a control as a user does, with the event that follows."""
    browser.execute_script(
        "const c = document.getElementById(arguments[0]);"
        "c[c.type === 'checkbox' ? 'checked' : 'value'] = arguments[1]; c.dispatchEvent(new Event('input'))",
        control,
        value,
    )


@needs_browser
def test_the_page_opens_from_disk_within_two_seconds(page_file, tmp_path_factory):
    """The first look in a new browser, which compiles all of plotly, as a reader's does.

    The clock is that of the page's main thread: other work on the machine is not the page's. Such work slows the
    thread too, through caches and cores that are shared, so the best of three browsers counts.
    """
    times = []
    while len(times) < 3 and min(times, default=LOAD_LIMIT) >= LOAD_LIMIT:
        driver = open_browser(tmp_path_factory.mktemp("profile"))
        try:
            driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            driver.get(page_file.as_uri())
            assert texts(driver, "#curves-plot .xtitle") == ["round"]  # drawn
            measured = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
            times += [1000 * one["value"] for one in measured if one["name"] == "TaskDuration"]
            first_paint = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
            assert driver.execute_script(first_paint) < LOAD_LIMIT  # header and tables do not wait for plotly
        finally:
            driver.quit()
    assert min(times) < LOAD_LIMIT, times


@needs_browser
def test_targets_that_cannot_be_used_are_named(opened):
    choose(opened, "target-list", "80, foo, 200 -5")
    assert texts(opened, "#target-problem") == ["not used: foo, 200, -5 (targets are above 0 and up to 100)"]
    assert opened.find_element("id", "target-list").get_attribute("aria-invalid") == "true"
    rows = opened.execute_script("return rowsOf(document.querySelector('#targets table'))")
    assert {row[0] for row in rows} == {"80%"}
    choose(opened, "target-list", "80")
    assert texts(opened, "#target-problem") == [""]


@needs_browser
def test_a_long_legend_of_rates_is_whole_on_a_phone(browser, tmp_path):
    names = ["fedavg", "fedams", "fedlamb", "mimelamb", "fedlada", "scaffold", "fedcm", "localadam"]
    for name in names:
        for lr in (0.1, 1.0):
            write_run(tmp_path / "tuning" / name / f"lr{lr}", [0.3, 0.4], lr=lr, algorithm=name)
    save.save_page(build.build([tmp_path]), tmp_path / "rates.html")
    resize(browser, 380, mobile=True)
    browser.get((tmp_path / "rates.html").as_uri())
    wait_for(browser, "document.querySelector('#rates-plot .main-svg')")
    shown = browser.find_elements("css selector", "#rates-legend button")
    assert len(shown) == len(names)
    assert all(one.is_displayed() and one.rect["x"] + one.rect["width"] <= 380 for one in shown)
    assert browser.execute_script("return document.querySelectorAll('#rates-plot .legend').length") == 0
    lines = "return document.querySelectorAll('#rates-plot .scatterlayer .trace').length"
    before = browser.execute_script(lines)
    shown[0].click()
    assert browser.execute_script(lines) < before


@needs_browser
def test_everything_is_there(opened, report):
    assert texts(opened, "nav a:not([hidden])") == [
        "Curves", "Targets", "Results", "Learning rates", "Partition", "Configuration", "Runs"
    ]  # fmt: skip
    assert texts(opened, "#legend button") == [curve.name for curve in report.curves]
    for plot in ("curves-plot", "rates-plot", "partition-plot"):
        assert opened.execute_script("return document.querySelectorAll(`#${arguments[0]} .main-svg`).length", plot)
    assert texts(opened, "#curves figure .export button") == ["PNG", "SVG"]
    assert "lies on the edge" in texts(opened, "#notes")[0]
    assert opened.execute_script("return window.hacked") is None
    assert opened.execute_script("return document.querySelectorAll('body img').length") == 0
    assert any(EVIL in label for label in texts(opened, "#legend button"))


@needs_browser
def test_hover_shows_a_label(opened):
    from selenium.webdriver.common.action_chains import ActionChains

    plot = opened.find_element("id", "curves-plot")
    ActionChains(opened).move_to_element_with_offset(plot, 40, 0).move_by_offset(5, 5).perform()
    wait_for(opened, "document.querySelector('#curves-plot .hoverlayer').textContent.includes('Fed-LAMB')")
    shown = texts(opened, "#curves-plot .hoverlayer")[0]
    assert EVIL in shown  # as text, in Plotly's labels too


@needs_browser
def test_the_axes_can_be_switched(opened):
    choose(opened, "axis", "bytes")
    assert texts(opened, "#curves-plot .xtitle") == ["kB sent, both directions"]
    choose(opened, "axis", "seconds")
    assert texts(opened, "#curves-plot .xtitle") == ["seconds of training"]
    choose(opened, "metric", "2")
    assert texts(opened, "#curves-plot .ytitle") == ["training loss"]
    kind = "document.getElementById('curves-plot').layout"
    choose(opened, "log-y", True)
    choose(opened, "log-x", True)
    assert opened.execute_script(f"return [{kind}.xaxis.type, {kind}.yaxis.type]") == ["log", "log"]


@needs_browser
def test_the_legend_hides_and_shows(opened):
    lines = "document.querySelectorAll('#curves-plot .scatterlayer .trace').length"
    assert opened.execute_script(f"return {lines}") == 10  # a band and a line for each of five
    opened.find_element("css selector", "#legend button").click()
    assert opened.execute_script(f"return {lines}") == 8
    assert opened.execute_script("return document.querySelector('#legend button').ariaPressed") == "false"
    choose(opened, "seeds", True)
    assert opened.execute_script(f"return {lines}") == 8 + 4 * 3
    choose(opened, "band", "")
    assert opened.execute_script(f"return {lines}") == 4 + 4 * 3


@needs_browser
def test_smoothing_is_centred(opened):
    assert opened.execute_script("return smoothed([0, 3, null, 6, 0], 1)") == [0, 3, None, 3, 0]
    choose(opened, "smooth", "5")
    assert texts(opened, "#smooth-value") == ["± 5 points"]


@needs_browser
def test_the_pages_tables_are_pythons(opened, report):
    """The cost table and CSV are made in JavaScript, too: they must be those of `--figures`."""
    for targets, baseline in ((report.targets, report.baseline), ([0.6, 0.855], 2), ([0.99], 4)):
        choose(opened, "target-list", ", ".join(f"{100 * target:g}" for target in targets))
        choose(opened, "baseline", str(baseline))
        expected = tables.cost_table(report.curves, targets, baseline)
        assert opened.execute_script("return rowsOf(document.querySelector('#targets table'))") == expected.rows
        text = opened.execute_script("return csvOf(document.querySelector('#targets table'))")
        assert text == tables.to_csv(expected)
    for table in report.tables()[1:]:
        element = f"document.querySelector('[data-name=\"{table.name}\"] table')"
        assert opened.execute_script(f"return csvOf({element})") == tables.to_csv(table)


@needs_browser
def test_figures_are_exported_as_on_paper(opened):
    draw = "const done = arguments[arguments.length - 1]; imageOf(arguments[0], arguments[1]).then(done)"
    prefer(opened, "dark")
    for name in ("curves", "learning-rates", "partition"):
        assert opened.execute_async_script(draw, name, "png").startswith("data:image/png;base64,")
        assert opened.execute_async_script(draw, name, "svg").startswith("data:image/svg+xml,")
    drawn = opened.execute_script("return curveFigure(true).layout.font.color")
    assert drawn == "rgb(34, 38, 43)"  # dark ink, though the screen is dark


@needs_browser
def test_odd_runs_are_shown_as_far_as_they_go(browser, tmp_path, monkeypatch):
    """No rounds, no evaluation, numbers that are not finite, columns that are missing, more curves than colours."""
    (write_run(tmp_path / "none", [0.5]) / "metrics.jsonl").write_text("")
    write_run(tmp_path / "unevaluated", [None, None], lr=0.2)
    bare = write_run(tmp_path / "bare", [0.5], lr=0.3)
    (bare / "metrics.jsonl").write_text('{"round": 1, "train_loss": null, "trust_ratio/<b>": 0.5}\n')
    for i in range(20):
        write_run(tmp_path / f"many{i}", [0.3, 0.4], lr=1 + i / 10, data={"clients": 1, "partition": {"name": "iid"}})
    monkeypatch.setattr(figures, "FORMATS", ("svg",))
    report = build.build([tmp_path])
    save.save_page(report, tmp_path / "odd.html")
    save.save_files(report, tmp_path / "files")
    resize(browser, 1200)
    browser.get((tmp_path / "odd.html").as_uri())
    wait_for(browser, "document.querySelector('#partition-plot .main-svg')")
    for metric in range(browser.execute_script("return data.metrics.length")):
        for axis in ("round", "bytes", "seconds"):
            choose(browser, "metric", str(metric))
            choose(browser, "axis", axis)
    assert texts(browser, "#curves-plot .ytitle") == ["trust ratio/<b>"]
    assert (
        browser.execute_script("return rowsOf(document.querySelector('#targets table'))")
        == tables.cost_table(report.curves, report.targets, report.baseline).rows
    )
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []


@needs_browser
def test_a_phone_scrolls_only_down(browser, page_file):
    resize(browser, 380, mobile=True)
    browser.get(page_file.as_uri())
    wait_for(browser, "document.querySelector('#partition-plot .main-svg')")
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert browser.execute_script("return document.documentElement.scrollWidth") == 380
    widest = (
        "Math.max(...[...document.querySelectorAll('.plot .main-svg')].map((e) => e.getBoundingClientRect().right))"
    )
    assert browser.execute_script(f"return {widest}") <= 380


@needs_browser
def test_dark_and_light(opened):
    paper = "return getComputedStyle(document.body).backgroundColor"
    ink = "return document.getElementById('curves-plot').layout.font.color"
    light = opened.execute_script(paper), opened.execute_script(ink)
    prefer(opened, "dark")
    wait_for(opened, "document.getElementById('theme').textContent === 'Light'")
    dark = opened.execute_script(paper), opened.execute_script(ink)
    assert dark == ("rgb(22, 24, 28)", "rgb(223, 226, 230)")
    opened.find_element("id", "theme").click()  # the switch overrules the system
    assert (opened.execute_script(paper), opened.execute_script(ink)) == light


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
@pytest.mark.parametrize("runs", ["two", "timed", "private"])
@pytest.mark.parametrize(("losses", "targets"), [(False, [0.6, 0.8, 0.9, 0.99]), (True, [0.01, 0.7, 1.0])])
def test_the_page_computes_the_same_costs(runs, losses, targets, request):
    """Without an accuracy, targets are losses: here 2 / round."""
    two = request.getfixturevalue("two" if runs == "private" else runs)
    if runs == "private":  # with secret cohorts, it tells no seconds
        for file in two.rglob("metrics.jsonl"):
            file.write_text(re.sub(r'"seconds": [^,}]*, ', "", file.read_text()))
    if losses:
        for file in two.rglob("metrics.jsonl"):
            file.write_text(re.sub(r', "accuracy": [^,}]*', "", file.read_text()))
    report = replace(build.build([two], targets=targets), baseline=1)
    assert report.metric == ("loss" if losses else "accuracy")
    script = (resources.files("lamina.report") / "page.js").read_text(encoding="utf-8")
    source = script[script.index("const fixed =") : script.index("function drawTargets")]
    typed = [target if losses else round(100 * target, 9) for target in targets]
    program = (
        f"const data = {page.embed(page.page_data(report))};\n"
        "const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;\n"
        f"{source}\nprocess.stdout.write(JSON.stringify(costRows({typed}, data.baseline)));"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == tables.cost_table(report.curves, report.targets, report.baseline).rows


CLOSING = "</script><script>window.hacked=1</script>"


def test_names_stay_text_in_the_page(tmp_path):
    write_run(tmp_path / "a", [0.5], algorithm=EVIL, model={"name": CLOSING})
    write_run(tmp_path / "b", [0.5], algorithm="fedavg", diverged=EVIL)
    text = page.html(build.build([tmp_path], title=EVIL))
    assert "<img" not in text.replace(page.plotly_js(), "")
    assert CLOSING not in text
    data = text.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    assert EVIL in json.loads(data)["curves"][1]["label"] + json.loads(data)["curves"][0]["label"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_latex_is_escaped():
    rows = [["x & y", "1.0 ± 0.5"], [r"\input{/etc/passwd}", "∞"]]
    script = (resources.files("lamina.report") / "page.js").read_text(encoding="utf-8")
    characters = script[script.index("const NUMBER =") : script.index("const textsOf =")]
    numeric = script[script.index("const isNumeric =") : script.index("function csvOf")]
    program = (
        f"const headOf = () => ['a_b', '50%']; const rowsOf = () => {json.dumps(rows)};\n{characters}\n{numeric}\n"
        f"{script[script.index('function latexOf') : script.index('/** Numbers to the right')]}\n"
        "process.stdout.write(latexOf(null));"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        r"% needs \usepackage{booktabs} and \usepackage[T1]{fontenc}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a\_b & 50\% \\",
        r"\midrule",
        r"x \& y & 1.0 $\pm$ 0.5 \\",
        r"\textbackslash{}input\{/etc/passwd\} & $\infty$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_without_plotly_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=r"lamina report needs plotly: pip install -e '\.\[report\]'"):
        page.plotly_js()
