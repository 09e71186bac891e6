"""`Views`: one URL of /api -> its answer. `app` asks in threads, and `export` collects the answers of a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

from verl_server.watch.site.advice import advisories_answer
from verl_server.watch.site.episode import episode_answer, text_answer, tokens_answer
from verl_server.watch.site.evaluations import evaluations_answer
from verl_server.watch.site.lanes import lanes_answer
from verl_server.watch.site.overview import events_answer, metrics_answer, runs_answer, settings_answer
from verl_server.watch.site.page_errors import PageError
from verl_server.watch.site.queries import Query
from verl_server.watch.site.runs import OpenRuns, WatchedRun
from verl_server.watch.site.steps import compare_answer, episodes_answer, groups_answer, steps_answer

RUN_VIEWS: Mapping[str, Callable[[WatchedRun, Query], bytes]] = {
    "metrics": metrics_answer,
    "events": events_answer,
    "advisories": advisories_answer,
    "evaluations": evaluations_answer,
    "lanes": lanes_answer,
    "steps": steps_answer,
    "episodes": episodes_answer,
}
ROW_VIEWS: Mapping[str, Callable[[WatchedRun, str, Query], bytes]] = {"text": text_answer, "tokens": tokens_answer}


class Views:
    """The answers about `runs`. Any thread may call it."""

    def __init__(self, runs: OpenRuns) -> None:
        self._runs = runs

    def answer(self, path: str, query: Query) -> bytes:
        """Return the answer of a decoded path below /api/. Raise VerlServerError with the status of the answer."""
        parts = path.split("/")
        if parts == ["runs"]:
            return runs_answer(self._runs, query)
        if parts[0] == "runs" and len(parts) >= 2:
            run = self._runs.with_index(parts[1])
            match parts[2:]:
                case []:
                    return settings_answer(run, query)
                case ["compare"]:
                    other = query.text("with")
                    return compare_answer(run, run if other is None else self._runs.with_index(other), query)
                case [name] if name in RUN_VIEWS:
                    return RUN_VIEWS[name](run, query)
                case ["steps", step]:
                    return groups_answer(run, step, query)
                case ["episodes", row]:
                    return episode_answer(run, row, query)
                case ["episodes", row, name] if name in ROW_VIEWS:
                    return ROW_VIEWS[name](run, row, query)
        raise PageError(404, f"There is no /api/{path:.200}.", "The page is at /.")

    def of_url(self, url: str) -> bytes:
        """Return the answer of a URL, which begins with /api/."""
        parts = urlsplit(url)
        return self.answer(unquote(parts.path).removeprefix("/api/"), Query(parse_qsl(parts.query)))
