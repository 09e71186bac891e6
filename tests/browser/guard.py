"""`PageGuard`: what every page must keep to, whatever a test does with it.

No answer of the server has more than 1 MB, the document never has more than 3,000 nodes, nothing is asked of another
origin, and there are no errors in the console, no dialogs, and nothing that the page's policy (CSP) had to stop.
"""

from __future__ import annotations

from typing import Any

from playwright.sync_api import ConsoleMessage, Page, Request, Response

MOST_BYTES = 1_000_000
MOST_NODES = 3000
# It runs before the page's own scripts. The document grows in batches, each of which the observer sees once.
_COUNTER = """
(() => {
  window.mostNodes = 0;
  window.violations = [];
  const count = () => {
    const walker = document.createTreeWalker(document);
    let nodes = 1;
    while (walker.nextNode()) nodes += 1;
    window.mostNodes = Math.max(window.mostNodes, nodes);
  };
  new MutationObserver(count).observe(document, { childList: true, subtree: true });
  addEventListener("securitypolicyviolation", (event) => {
    window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
  });
})();
"""


class PageGuard:
    def __init__(self, page: Page, origin: str) -> None:
        """`origin` is the server's, or "file://"."""
        self.page, self.most_nodes, self.largest_answer = page, 0, 0
        self._origin, self._faults = origin, list[str]()
        self._allowed: list[str] = []
        page.add_init_script(_COUNTER)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self._faults.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", self._request)
        page.on("response", self._response)

    def allow(self, part: str) -> None:
        """Let console errors through that have `part`, such as those about an answer that a test wants refused."""
        self._allowed.append(part)

    def collect(self) -> None:
        """Read the page's counters. To be called before a page is loaded anew, which begins them again."""
        found: dict[str, Any] = self.page.evaluate(
            "({ nodes: window.mostNodes ?? 0, violations: window.violations ?? [] })"
        )
        self.most_nodes = max(self.most_nodes, found["nodes"])
        self._faults += [f"policy: {violation}" for violation in found["violations"]]

    def check(self) -> None:
        self.collect()
        assert not self._faults, "\n".join(self._faults)
        assert self.most_nodes <= MOST_NODES, f"{self.most_nodes} nodes"
        assert self.largest_answer <= MOST_BYTES, f"an answer of {self.largest_answer} bytes"

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not any(part in message.text for part in self._allowed):
            self._faults.append(f"console: {message.text}")

    def _dialog(self, dialog: Any) -> None:
        self._faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self._origin, "data:")):
            self._faults.append(f"request to another origin: {request.url}")

    def _response(self, response: Response) -> None:
        if response.url.startswith("data:") or "/api/live" in response.url or self._origin == "file://":
            return
        size = response.headers.get("content-length")
        if size is None:
            self._faults.append(f"an answer without a length: {response.url}")
        else:
            self.largest_answer = max(self.largest_answer, int(size))
