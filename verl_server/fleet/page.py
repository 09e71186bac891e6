"""`fleet_page`: the state of a fleet (`FleetStatus.as_dict`) as one HTML page, which loads itself again."""

from __future__ import annotations

import html
from typing import Any

HEADERS = [
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
"""Headers of the page. It has neither scripts nor parts from elsewhere."""
_SECONDS = 2
"""Seconds after which a browser loads the page again."""
_REASONS = {
    "conversation": "stayed with their conversation",
    "prefix": "went where their beginning is cached",
    "load": "to the least loaded",
    "spilled": "left a cache that had too much work",
    "key": "by an Idempotency-Key",
}


def fleet_page(state: dict[str, Any]) -> bytes:
    servers = state["servers"]
    healthy = sum(server["state"] == "healthy" for server in servers)
    models = {server["model"] for server in servers if server["model"]}
    facts = {
        "Model": ", ".join(sorted(models)) or "not known yet",
        "Version": _version(state),
        "Last push": _push(state["spread"]),
        "Sessions": f"{state['sessions']:,}",
        "Requests placed": _placed(state["placements"]),
    }
    text = _PAGE.format(
        seconds=_SECONDS,
        name=html.escape(state["fleet"]),
        summary=f"{healthy} of {len(servers)} servers healthy",
        mood="healthy" if healthy == len(servers) else "stale" if healthy else "dead",
        facts="".join(f"<dt>{name}<dd>{html.escape(text)}" for name, text in facts.items()),
        rows="".join(map(_row, servers)),
        version=html.escape(state["version"]),
    )
    return text.encode("utf-8", "replace")


def _version(state: dict[str, Any]) -> str:
    committed, newest = state["committed"], state["newest"]
    if committed is None:
        return "what the servers loaded: no trainer has pushed"
    return committed if newest in (None, committed) else f"{committed}; {newest} is on its way to all servers"


def _push(spread: dict[str, Any] | None) -> str:
    if spread is None:
        return "none since the router began"
    return f"{spread['weight_version']} was in service {spread['seconds']:.1f} s after the first server had it"


def _placed(counts: dict[str, int]) -> str:
    placed = [f"{counts[name]:,} {text}" for name, text in _REASONS.items() if counts.get(name)]
    return " · ".join(placed) or "none yet"


def _row(server: dict[str, Any]) -> str:
    is_known = server["weight_version"] is not None
    load = min(1.0, server["load"])
    state = f"{server['state']}, paused" if server["paused"] and is_known else server["state"]
    bar = (
        f'<span class=bar><i style="width:{100 * load:.0f}%"></i></span>{100 * server["load"]:.0f} %'
        f" <small>of {server['capacity']:,} tokens</small>"
    )
    cells = [
        html.escape(server["url"]),
        f"<b>{state}</b>",
        html.escape(str(server["weight_version"])) if is_known else "",
        f"{server['lag']} behind" if server["lag"] else "",
        f"{server['requests']:,}" if is_known or server["requests"] else "",
        bar if is_known else "",
        html.escape(server["reason"] or ""),
    ]
    return f"<tr class={server['state']}>" + "".join(f"<td>{cell}" for cell in cells)


_PAGE = """<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content={seconds}>
<meta name=viewport content="width=device-width"><meta name=color-scheme content="light dark">
<title>{name}: {summary}</title><style>
:root{{--ink:#1c2430;--soft:#5a6573;--line:#e3e7ec;--page:#fff;--good:#1a7f4b;--warn:#a36200;--bad:#b3261e;--bar:#3b6fb6}}
@media (prefers-color-scheme:dark){{:root{{--ink:#e3e7ec;--soft:#9aa5b3;--line:#2b323b;--page:#14181d;--good:#4cc38a;
--warn:#e0a33a;--bad:#ff7a70;--bar:#6ea0e6}}}}
body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:82rem;padding:0 1rem;color:var(--ink);
background:var(--page)}}
h1{{font-size:1.5rem;margin:0}} h1 small{{font-weight:400;font-size:1rem;margin-left:.7rem}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;margin:1rem 0 1.5rem}}
dt,th,small,footer,td:last-child{{color:var(--soft)}} dd{{margin:0}}
div{{overflow-x:auto}} table{{border-collapse:collapse;width:100%}} th{{text-align:left;font-weight:600}}
td,th{{padding:.45rem .9rem .45rem 0;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}}
td:last-child{{white-space:normal;min-width:16rem}} td:nth-child(5),th:nth-child(5){{text-align:right}}
td:nth-child(n+3):nth-child(-n+6){{font-variant-numeric:tabular-nums}}
b{{color:var(--warn);font-weight:600}} .healthy b{{color:var(--good)}}
.dead b{{color:var(--bad)}} .retired b,.starting b{{color:var(--soft)}}
small.healthy{{color:var(--good)}} small.stale{{color:var(--warn)}} small.dead{{color:var(--bad)}}
.bar{{display:inline-block;width:5rem;height:.55rem;background:var(--line);border-radius:.3rem;margin-right:.5rem;
overflow:hidden}} .bar i{{display:block;height:100%;background:var(--bar)}}
footer{{margin-top:1.2rem;font-size:.85rem}} a{{color:inherit}}
</style><h1>{name}<small class={mood}>{summary}</small></h1><dl>{facts}</dl><div><table>
<tr><th>Server<th>State<th>Version<th>Lag<th>Requests<th>Tokens in flight<th>Why{rows}</table></div>
<footer>verl-server {version} · loads itself again each {seconds} s · <a href="/metrics">metrics</a> ·
<a href="/fleet?format=json">JSON</a></footer></html>
"""
