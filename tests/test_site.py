"""The site: built strictly, it fetches nothing from elsewhere, knows all pages and fits any width."""

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.support.processes import ROOT

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
# What a browser fetches by itself when it shows a page; an <a href> it does not.
FETCHED = re.compile(r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\ssrc=\"?([^\s\">]+)")
LINKED = re.compile(r"<link\b[^>]*?\shref=\"?([^\s\">]+)")
IN_STYLES = re.compile(r"(?:url\(|@import\s+)[\"']?([^\"')\s]+)")
ELSEWHERE = re.compile(r"(?:https?:)?//")

# A page that shows each page in a frame, in both widths, and sends back what it saw.
PROBE = """<!doctype html><body><script>
const pages = PAGES, term = TERM, found = {pages: {}, fetched: [], results: []};
const frame = document.body.appendChild(document.createElement("iframe"));
frame.height = 900;
const show = url => new Promise(done => { frame.onload = done; frame.src = url; });
const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));
(async () => {
  frame.style.border = 0;
  for (const page of pages) {
    await show(page);
    const still = frame.contentDocument.createElement("style"); // what is measured has arrived
    still.textContent = "* { transition: none !important; animation: none !important; }";
    frame.contentDocument.head.append(still);
    for (const width of [1280, 390]) {
      frame.width = width;
      const shown = frame.contentDocument.documentElement; // reading it lays the page out anew
      found.pages[width + " " + page] = shown.scrollWidth - frame.contentWindow.innerWidth;
    }
    for (const entry of frame.contentWindow.performance.getEntriesByType("resource"))
      if (!entry.name.startsWith(location.origin)) found.fetched.push(entry.name);
  }
  frame.width = 1280;
  await show("index.html?q=" + term);
  for (let tries = 0; tries < 100 && !found.results.length; tries++) {
    await wait(100);
    found.results = [...frame.contentDocument.querySelectorAll("a.md-search-result__link")].map(a => a.href);
  }
  await fetch("/seen", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


def pages_of(site: Path) -> list[str]:
    return sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html"))


def elsewhere(text: str, *patterns: re.Pattern[str]) -> list[str]:
    """Return the addresses on other hosts among what these patterns match."""
    return [address for pattern in patterns for address in pattern.findall(text) if ELSEWHERE.match(address)]


def seen_in_browser(site: Path, term: str, profile: Path) -> dict[str, Any]:
    """Return what a headless browser sees of a site: too wide pages, what it fetched, what search finds."""
    seen: list[bytes] = []
    arrived = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()
            arrived.set()

        def log_message(self, *arguments: Any) -> None:
            pass

    (site / "probe.html").write_text(PROBE.replace("PAGES", json.dumps(pages_of(site))).replace("TERM", f'"{term}"'))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/probe.html"
        options = [*OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-port=0"]  # the port: so that it stays
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([str(BROWSER), *options, address], **quiet) as browser:
            arrived.wait(900)  # 30 s where nothing else runs
            browser.terminate()
        server.shutdown()
    (site / "probe.html").unlink()
    assert seen, "the browser did not answer"
    return json.loads(seen[0])


def test_what_is_fetched_is_found() -> None:
    page = '<link rel=x href=https://a/b><script src="//c/d"></script><img alt="" src=e.png><a href="https://f">'
    assert elsewhere(page, FETCHED, LINKED) == ["//c/d", "https://a/b"]
    assert elsewhere('@import "https://a/b"; url(c.png) url("http://d/e")', IN_STYLES) == ["https://a/b", "http://d/e"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, built.stderr
    yield folder


@pytest.mark.full
def test_pages_fetch_nothing_from_elsewhere_and_link_to_files_and_to_papers(site: Path) -> None:
    for style in site.rglob("*.css"):
        assert elsewhere(style.read_text(encoding="utf-8"), IN_STYLES) == [], style
    for page in pages_of(site):
        text = (site / page).read_text(encoding="utf-8")
        assert elsewhere(text, FETCHED, LINKED) == [] and "mermaid" not in text, page  # which comes from a host
        if page != "404.html":  # whose links are the server's
            links = re.findall(r"<a\b[^>]*?\shref=\"?([^\s\">#?]+)", text)
            local = {unquote(link) for link in links if not re.match(r"[a-z]+:", link)}
            assert [link for link in local if not (site / page).parent.joinpath(link).resolve().exists()] == [], page
        words = re.sub(r"<(code|pre|title|a)\b.*?</\1>", "", text[text.index("<article") :], flags=re.DOTALL)
        assert re.findall(r"arXiv \d{4}\.\d+|\b\w[\w.-]*/[\w.-]+#\d+", words) == [], page


@pytest.mark.full
def test_search_and_llms_txt_know_all_pages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    for term in ("outstanding_weight_updates_bytes", "delayed_state_dict", "troubleshooting"):
        assert any(term in entry["text"].lower() + entry["location"] for entry in index)
    listed = set(re.findall(r"\]\(([^)]+\.html)\)", (site / "llms.txt").read_text(encoding="utf-8")))
    assert {page for page in pages_of(site) if not page.startswith("files/")} - {"404.html"} == listed


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_search_finds_a_name_in_pages_that_are_opened_as_files(site: Path, tmp_path: Path) -> None:
    options = [*OPTIONS, f"--user-data-dir={tmp_path}", "--virtual-time-budget=60000", "--dump-dom"]
    command = [str(BROWSER), *options, f"{(site / 'index.html').as_uri()}?q=outstanding_weight_updates_bytes"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    links = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', shown)
    assert any("octavo.optim.update_in_backward" in link for link in links)


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_browser_shows_all_pages_at_two_widths_and_finds_a_name(site: Path, tmp_path: Path) -> None:
    seen = seen_in_browser(site, "outstanding_weight_updates_bytes", tmp_path)
    assert {page: beyond for page, beyond in seen["pages"].items() if beyond > 0} == {}
    assert seen["fetched"] == []
    assert any("octavo.optim.update_in_backward" in link for link in seen["results"])
