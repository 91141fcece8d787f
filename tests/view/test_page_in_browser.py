"""The page in a real browser: what a user sees, clicks and types, served and as a report.

Every test also fails on an error in the browser's console, and on a request that leaves the page's own address.
"""

import json
import os
import re
import shutil
import tempfile
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect, sync_playwright

from openrlhf.view import server
from openrlhf.view.report import write_report
from openrlhf.view.runs import find_runs
from tests.view.made_runs import HOSTILE, SEARCHES, TEXTS, make_run, record, write_metrics, write_step
from tests.view.test_view_server import serving

# None: the one that `playwright install` gets
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WAIT = 20_000  # milliseconds; only a hanging page takes this long

pytestmark = pytest.mark.slow(seconds=1)  # each; `make check` needs no browser


@pytest.fixture(scope="module")
def browser():
    """Chromium, with its own temporary folder: it puts a socket there, whose path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="or", dir="/tmp") as folder, sync_playwright() as playwright:
        environ = os.environ | {"TMPDIR": folder}
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, env=environ)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory, agent_run):
    """Hand-made runs, one with hostile text in every place, and a real run with two turns."""
    folder = tmp_path_factory.mktemp("made")
    grpo = make_run(folder / "grpo", flags={"learning_rate": 1e-3, "seed": 1})
    write_step(grpo, 4, [record(4, 8, HOSTILE, reward=0.9, prompt="<script>prompt()</script>")])
    write_metrics(grpo, [("train", 30, {"<b>metric</b>": 1.0})])
    other = make_run(folder / "<i>other", steps=20, recorded=0, flags={"learning_rate": 1e-4, "seed": 1})
    return [grpo, other, agent_run]


@pytest.fixture(scope="module")
def addresses(made, tmp_path_factory):
    """The address of each form of the page."""
    folder = tmp_path_factory.mktemp("page")
    runs = find_runs(made)
    write_report(folder / "report.html", runs, title="A report", summary={"accuracy": "1% -> 99%"})
    with serving(folder / "index", *made) as served:
        yield {"served": served, "report": (folder / "report.html").as_uri()}


@pytest.fixture
def visit(browser):
    """Return a function that opens an address; at the end there must be no errors and no requests elsewhere."""
    problems, contexts = [], []

    def visit(address, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 2000}} | options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        own = urlsplit(address)

        def check_request(request):
            asked = urlsplit(request.url)
            if asked.scheme != "data" and (asked.netloc, asked.scheme) != (own.netloc, own.scheme):
                problems.append(request.url)

        context.on("request", check_request)
        page.goto(address)
        page.locator(".uplot canvas").first.wait_for()
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(params=["served", "report"])
def page(request, visit, addresses):
    """The page in both forms."""
    return visit(addresses[request.param])


def chart(page, name):
    return page.locator(".chart", has=page.locator(".metric", has_text=re.compile(f"^{re.escape(name)}$"))).first


def open_samples(page, run="grpo"):
    page.get_by_role("tab", name="Samples").click()
    (number,) = page.get_by_label("Run", exact=True).select_option(label=run)
    return page.locator(f".list[data-run='{number}'] li")


def found(page, text):
    expect(page.locator(".found")).to_have_text(text, timeout=WAIT)


def has_ink(page, selector):
    """True if a canvas has pixels that are not empty."""
    script = """canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"""
    return page.locator(selector).first.evaluate(script)


# Curves


def test_curves_are_drawn_in_groups_and_overlaid(page):
    headings = page.locator(".group:not([hidden]) h2").all_inner_texts()
    assert headings == [
        *("Reward", "Evaluation", "Losses", "KL", "Entropy", "Length", "Clip fraction", "Engine and trainer"),
        *("Time per phase", "Optimizer", "More"),
    ]
    first = page.locator(".group").first.locator(".metric").all_inner_texts()
    assert first[:3] == ["reward", "score", "group_reward_std"]
    assert first[-1] == "return"  # flat with group estimators
    assert has_ink(page, ".chart canvas")
    assert chart(page, "reward").locator(".readout li").all_inner_texts() == [
        "grpo\n1",
        "<i>other\n1",
        "agent\n" + last(page),
    ]
    chart(page, "mine").wait_for(state="attached")
    assert page.locator(".group", has=page.get_by_role("heading", name="More")).get_attribute("open") is None


def last(page):
    return chart(page, "reward").locator(".readout b").nth(2).inner_text()


def test_hovering_and_arrow_keys_show_the_values_of_a_step(page):
    reward = chart(page, "reward")
    box = reward.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 20)
    expect(reward.locator(".at")).to_have_text("step 30")
    expect(reward.locator("b")).to_have_text(["1", "–", "–"])  # the other runs have ended
    expect(chart(page, "kl").locator(".at")).to_have_text("step 30")  # all charts point at the same step
    reward.locator(".plot").focus()
    page.keyboard.press("Home")
    expect(reward.locator(".at")).to_have_text("step 1")
    expect(reward.locator("b").nth(1)).to_have_text("0.05")
    page.keyboard.press("ArrowRight")
    expect(reward.locator("b").nth(1)).to_have_text("0.1")
    assert "reward at step 2: grpo 0.06667" in reward.locator(".plot").get_attribute("aria-label")
    page.keyboard.press("Escape")
    expect(reward.locator(".at")).to_have_text("")


def test_runs_can_be_hidden_metrics_filtered_and_curves_smoothed(page):
    page.get_by_role("checkbox", name="<i>other").uncheck()
    expect(chart(page, "reward").locator(".readout li")).to_have_count(2)
    page.keyboard.press("/")
    page.keyboard.type("entro")
    expect(page.locator(".group:not([hidden]) h2")).to_have_text(["Entropy"])
    page.get_by_label("Smoothing").fill("0.9")
    smoothed = 2 - sum(0.9**age * (30 - age) / 30 for age in range(30)) / sum(0.9**age for age in range(30))
    expect(chart(page, "entropy").locator("b").first).to_have_text(f"{smoothed:.4g}")
    page.get_by_label("Filter metrics").fill("nothing like it")
    expect(page.locator(".empty").first).to_have_text("No metric has that name.")


def test_flags_that_differ_are_compared(page):
    page.get_by_role("tab", name="Flags").click()
    page.get_by_role("checkbox", name="agent").uncheck()
    rows = page.locator("#flags tbody tr")
    expect(rows).to_have_text(["--learning_rate0.0010.0001"])
    page.get_by_label("Also flags that are equal").check()
    expect(rows).to_have_count(4)
    page.get_by_label("Filter flags").fill("ckpt")
    expect(rows).to_have_text(["--max_ckpt_memInfinityInfinity"])


# Samples


def test_filters_and_search_narrow_the_list(page):
    open_samples(page)
    found(page, "37 samples")
    page.get_by_label("Step from").fill("2")
    page.get_by_label("Step to").fill("3")
    found(page, "24 samples of 37")
    page.get_by_label("Reward from").fill("0.5")
    found(page, "12 samples of 37")
    page.get_by_label("Finish").select_option("length")
    found(page, "6 samples of 37")
    page.get_by_label("Tokens from").fill("9")
    found(page, "0 samples of 37")
    page.get_by_label("Tokens from").fill("")
    found(page, "6 samples of 37")  # the list is empty until then
    page.get_by_label("Order").select_option("worst")
    rewards = page.locator(".list .reward").all_inner_texts()
    expect(page.locator(".list .reward")).to_have_text(sorted(rewards, key=float))
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("WORD2")
    found(page, "2 samples of 37")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Search prompts and responses")).not_to_be_focused()


def test_a_report_finds_the_same_words_as_the_index(visit, tmp_path):
    run_dir = make_run(tmp_path / "made", recorded=0)
    write_step(run_dir, 1, [record(1, 0, text) for text in TEXTS])
    write_report(tmp_path / "report.html", find_runs([run_dir]))
    page = visit((tmp_path / "report.html").as_uri())
    open_samples(page, "made")
    for text, matches in SEARCHES:
        page.get_by_label("Search prompts and responses").fill(text)
        found(page, f"{len(matches)} sample{'s' * (len(matches) != 1)} of {len(TEXTS)}")
        expect(page.locator(".list .text")).to_have_text([TEXTS[number] for number in matches])


def test_samples_of_a_prompt_are_side_by_side(page):
    rows = open_samples(page)
    rows.filter(has_text="word1 a2").first.click()
    cards = page.locator(".card")
    expect(cards.locator(".tokens")).to_have_text([f"word1 a{number}" for number in range(4)])
    expect(page.locator(".card.chosen .tokens")).to_have_text("word1 a2")
    expect(cards.nth(3).locator(".facts")).to_contain_text("finishlength")
    expect(page.locator(".prompt-head")).to_contain_text("Step 3 · prompt 1 · 4 samples")
    expect(page.locator(".prompt-text")).to_have_text("sort 31>")
    page.get_by_role("button", name="this prompt in all steps").click()
    found(page, "12 samples of 37")
    page.get_by_role("button", name="prompt 1").click()
    found(page, "37 samples")


def test_tokens_are_coloured_by_advantage_and_by_gap(page):
    rows = open_samples(page)
    rows.filter(has_text="word2 a0").first.click()
    card = page.locator(".card")
    expect(card.first.locator(".tokens")).to_have_text("word2 a0")
    assert kinds(card.first) == {"token down"}  # reward 1/3, below the mean
    assert kinds(card.nth(3)) == {"token up"}
    assert strength(card.nth(0)) < strength(card.nth(3))
    expect(page.locator(".legend")).to_contain_text("+0.3333 advantage")
    page.get_by_text("Log-prob gap", exact=True).click()
    expect(page.locator(".legend")).to_contain_text("+0.1 engine − trainer")
    assert kinds(card.first) == {"token down", "token "}  # the trainer's log-probs are larger, or equal
    card.first.locator(".token").nth(1).hover()
    expect(page.locator(".token-about")).to_have_text(
        re.compile(r"“o” · id \d+ · advantage -0.1667 · engine -0.25 .* gap")
    )
    card.first.locator(".tokens").focus()
    page.keyboard.press("End")
    expect(page.locator(".token-about")).to_contain_text("“0”")
    page.get_by_text("Plain", exact=True).click()
    assert kinds(card.first) == {"token "}


def test_a_prompt_whose_samples_have_equal_rewards_has_no_scale(visit, tmp_path):
    run_dir = make_run(tmp_path / "made", recorded=0)
    write_step(run_dir, 1, [record(1, 0, text, reward=0.5) for text in TEXTS])
    write_report(tmp_path / "report.html", find_runs([run_dir]))
    page = visit((tmp_path / "report.html").as_uri())
    open_samples(page, "made").first.click()
    expect(page.locator(".legend")).to_have_text("every advantage is 0")


def kinds(card):
    return set(card.locator(".token").evaluate_all("tokens => tokens.map(token => token.className)"))


def strength(card):
    color = card.locator(".token").first.evaluate("token => getComputedStyle(token).backgroundColor")
    return float(re.findall(r"[\d.]+", color)[-1])


def test_turns_of_an_episode_are_marked(page):
    open_samples(page, "agent").first.click()
    card = page.locator(".card").first
    expect(card.locator(".turn")).to_have_text(["turn 1", "environment", "turn 2"])
    environment = card.locator(".token.environment").all_inner_texts()
    assert "".join(environment) == "again!"
    expect(card.locator(".facts")).to_contain_text("turns2")


def test_the_list_is_used_by_keyboard(page):
    rows = open_samples(page)
    expect(rows.nth(1)).to_be_visible(timeout=WAIT)  # keys do nothing in a list that is not filled yet
    page.locator(".list").focus()
    page.keyboard.press("Home")
    expect(rows.nth(0)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowDown")
    expect(rows.nth(1)).to_have_attribute("aria-selected", "true")
    assert page.locator(".list").get_attribute("aria-activedescendant") == rows.nth(1).get_attribute("id")
    expect(page.locator(".card.chosen .tokens")).to_have_text(rows.nth(1).locator(".text").inner_text())
    page.get_by_role("tab", name="Samples").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tab", name="Curves")).to_be_focused()
    expect(page.locator("#curves")).to_be_visible()


def test_hostile_texts_are_only_text(page):
    rows = open_samples(page)
    rows.filter(has_text="onerror").first.click()
    expect(page.locator(".card .tokens")).to_have_text(HOSTILE)
    expect(page.locator(".prompt-text")).to_have_text("<script>prompt()</script>")
    assert page.locator("main img, main script, aside i").count() == 0
    assert page.title() in ("openrlhf view", "A report")


# Both colour schemes, small screens


@pytest.mark.parametrize("form", ["served", "report"])
def test_dark_mode_and_a_change_of_it(visit, addresses, form):
    page = visit(addresses[form], color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", dark))) < 60
    page.emulate_media(color_scheme="light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert min(map(int, re.findall(r"\d+", light))) > 200
    assert has_ink(page, ".chart canvas")


def test_a_phone_never_scrolls_sideways(visit, addresses):
    page = visit(addresses["served"], viewport={"width": 375, "height": 740})
    for name in ("Curves", "Samples", "Flags"):
        page.get_by_role("tab", name=name).click()
        page.locator({"Curves": ".uplot", "Samples": ".card", "Flags": "tbody"}[name]).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 375, name


def test_every_control_has_a_name(page):
    for name in ("Curves", "Samples", "Flags"):
        page.get_by_role("tab", name=name).click()
        for role in (
            "textbox",
            "searchbox",
            "spinbutton",
            "combobox",
            "slider",
            "checkbox",
            "radio",
            "button",
            "listbox",
        ):
            for node in page.get_by_role(role).all():
                snapshot = node.aria_snapshot()
                assert '"' in snapshot, (name, role, node.evaluate("node => node.outerHTML"))


# Runs that train


def test_curves_and_samples_follow_a_run(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "SEARCH_SECONDS", 0)
    run_dir = make_run(tmp_path / "runs" / "live", steps=2, recorded=1)
    with serving(tmp_path / "index", tmp_path / "runs") as address:
        page = visit(address)
        expect(chart(page, "reward").locator("b")).to_have_text(["1"])
        expect(page.locator(".status")).to_have_text("live")
        write_metrics(run_dir, [("train", 3, {"reward": 7.5}), ("train", 3, {"new_metric": 1.0})])
        expect(chart(page, "reward").locator("b")).to_have_text(["7.5"], timeout=WAIT)
        expect(page.locator(".runs .about")).to_contain_text("3 steps")
        open_samples(page, "live")
        found(page, "12 samples")
        write_step(run_dir, 2, [json.dumps(record(2, 5, "fresh")), "{broken", json.dumps(record(2, 5, "new"))[:50]])
        found(page, "13 samples; 2 unreadable records left out")
        expect(page.locator(".list .text").first).to_have_text("fresh")
        make_run(tmp_path / "runs" / "second")
        expect(page.locator(".runs .name")).to_have_text(["live", "second"], timeout=WAIT)
        write_metrics(tmp_path / "new", [("train", 1, {"reward": 0.25})])
        (tmp_path / "new" / "metrics.jsonl").replace(run_dir / "metrics.jsonl")  # the run starts over
        page.get_by_role("tab", name="Curves").click()
        expect(chart(page, "reward").locator("b").first).to_have_text("0.25", timeout=WAIT)


def test_an_error_of_the_server_is_shown_and_does_not_end_the_updates(browser, tmp_path):
    run_dir = make_run(tmp_path / "live", steps=2, recorded=0)
    with serving(tmp_path / "index", tmp_path) as address, browser.new_context() as context:
        page = context.new_page()
        page.goto(address)
        expect(page.locator(".status")).to_have_text("live", timeout=WAIT)
        page.route("**/api/metrics?*", lambda route: route.fulfill(status=500))
        expect(page.locator(".status")).to_have_text("error: metrics: status 500", timeout=WAIT)
        write_metrics(run_dir, [("train", 3, {"reward": 7.5})])
        page.unroute("**/api/metrics?*")
        expect(page.locator(".status")).to_have_text("live", timeout=WAIT)
        expect(chart(page, "reward").locator("b")).to_have_text(["7.5"], timeout=WAIT)


def test_a_chart_follows_its_run_again_after_zooming_out(visit, tmp_path):
    run_dir = make_run(tmp_path / "live", steps=10, recorded=0)
    with serving(tmp_path / "index", tmp_path) as address:
        page = visit(address)
        reward = chart(page, "reward")
        box = reward.locator(".u-over").bounding_box()
        middle, height = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(middle, height)
        page.mouse.down()
        page.mouse.move(middle + 90, height)
        page.mouse.up()
        page.mouse.move(0, 0)
        write_metrics(run_dir, [("train", 11, {"reward": 2.0})])
        expect(reward.locator("b")).to_have_text(["2"], timeout=WAIT)
        assert step_at_right_edge(page, reward) < 10  # still zoomed in
        page.mouse.dblclick(middle, height)
        write_metrics(run_dir, [("train", 12, {"reward": 3.0})])
        expect(page.locator(".runs .about")).to_have_text("12 steps", timeout=WAIT)
        assert step_at_right_edge(page, reward) == 12


def step_at_right_edge(page, plot):
    box = plot.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 20)
    expect(plot.locator(".at")).to_have_text(re.compile("^step "))
    step = int(plot.locator(".at").inner_text().split()[1])
    page.mouse.move(0, 0)
    return step


def test_flags_of_a_run_that_starts_over_are_shown(visit, tmp_path):
    run_dir = make_run(tmp_path / "live", steps=2, recorded=0, flags={"seed": 1})
    with serving(tmp_path / "index", tmp_path) as address:
        page = visit(address)
        page.get_by_role("tab", name="Flags").click()
        seed = page.locator("#flags tbody tr", has_text="--seed")
        expect(seed).to_have_text("--seed1")
        (run_dir / "metrics.jsonl").unlink()
        make_run(tmp_path / "live", steps=1, recorded=0, flags={"seed": 2})
        expect(seed).to_have_text("--seed2", timeout=WAIT)


def test_a_report_shows_its_title_and_summary(visit, addresses):
    page = visit(addresses["report"])
    expect(page.locator("h1")).to_have_text("A report")
    expect(page.locator(".summary")).to_have_text("accuracy1% -> 99%")
    expect(page.locator(".status")).to_have_text("report")
    page.wait_for_load_state()
    assert page.evaluate("scrollY") == 0  # the address names a view, which the browser must not scroll to
