"""The statements of a run's database: its tables, and how rows of lines become episodes with a step.

`run_database` executes them. `lines` has a row for each line; `episodes` has one for each episode, made from its lines.
What depends on the events of the run (`run_starts`) is settled for the rows in the table `affected`.
"""

from __future__ import annotations

from verl_server.watch.index.columns import LINE, SOURCES, TRAINED, create
from verl_server.watch.index.rows import HELD_OUT_PLACE

_SETTLED = {
    "episode": "INTEGER",  # id of the episode's first line
    "used": "INTEGER",  # step that used it
    "place": "TEXT",  # `StepRow.name`
    "fate": "TEXT",
    "is_lost": "INTEGER",
    "is_replaced": "INTEGER",
    "began": "REAL",
    "ended": "REAL",
}
_HEAD = (
    *("file", "offset", "length", "kind", "step", "rank", "incarnation", "time", "phase", "seed", "episode_id", "grp"),
    *("member", "attempt", "task", "session", "branch", "reward", "stop_reason", "fault", "error", "used", "place"),
    *("fate", "is_lost", "is_replaced", "answer"),
)
"""Columns of an episode that are those of its first line."""
_SUMS = {
    "branches": "count(*)",
    "turns": "sum(turns)",
    "tokens": "max(tokens)",
    "sampled": "sum(sampled)",
    "generate_s": "sum(generate_s)",
    "env_s": "sum(env_s)",
    "queue_s": "sum(queue_s)",
    "began": "min(began)",
    "ended": "max(ended)",
    "versions": "max(versions)",
    "tools": "group_concat(nullif(tools, ''), char(10))",
    "logprob": "sum(logprob * sampled) / nullif(sum(sampled), 0)",
    "bytes": "sum(length)",
}
"""Columns of an episode that are of all its lines."""
_REGULAR = "coalesce(h.stop_reason, '') IN ('done', 'max_turns', 'max_tokens', 'context_full')"
_UNSAMPLED = f"(({_REGULAR}) OR h.reward IS NOT NULL) AND a.sampled = 0"
_JUDGED = {
    "is_unsampled": f"({_UNSAMPLED})",
    "is_scored": f"(h.reward IS NOT NULL AND NOT ({_UNSAMPLED}))",
    "is_failed": f"(h.error IS NOT NULL AND (h.reward IS NULL OR NOT ({_REGULAR})))",
    "oldest": "CASE WHEN a.branches = 1 THEN h.oldest ELSE (SELECT oldest FROM lines WHERE episode = h.id "
    "AND versions > 0 ORDER BY CAST(oldest AS INTEGER), id LIMIT 1) END",
    "newest": "CASE WHEN a.branches = 1 THEN h.newest ELSE (SELECT newest FROM lines WHERE episode = h.id "
    "AND versions > 0 ORDER BY CAST(newest AS INTEGER) DESC, id DESC LIMIT 1) END",
}
"""Columns of an episode that are judged as `train.rollout_report` judges them, and its versions. h is the first line, a
has the sums."""
NEWEST = "coalesce(time, ended, used, 0)"
"""By what the newest episodes are found."""
EPISODE = ("id", *_HEAD, *_SUMS, *_JUDGED)

CREATE = (
    create("lines", LINE | _SETTLED, "id INTEGER PRIMARY KEY"),
    create("trained", TRAINED, "id INTEGER PRIMARY KEY"),
    f"CREATE TABLE episodes (id INTEGER PRIMARY KEY, {', '.join(EPISODE[1:])})",
    "CREATE TABLE fates (grp INTEGER, incarnation TEXT, start_step INTEGER, fate TEXT, step INTEGER, "
    "PRIMARY KEY (grp, incarnation, start_step)) WITHOUT ROWID",
    "CREATE TABLE begun (step INTEGER, incarnation TEXT, time REAL, PRIMARY KEY (step, incarnation)) WITHOUT ROWID",
    SOURCES,
    "CREATE UNIQUE INDEX lines_place ON lines (file, offset)",
    "CREATE INDEX lines_key ON lines (grp, member, step, incarnation)",
    "CREATE INDEX lines_episode ON lines (episode)",
    "CREATE UNIQUE INDEX trained_place ON trained (file, offset)",
    "CREATE INDEX trained_key ON trained (grp, member, sampled_step, incarnation)",
    "CREATE INDEX episodes_place ON episodes (place, is_lost, is_replaced, grp)",
    f"CREATE INDEX episodes_newest ON episodes ({NEWEST}, file, offset)",
)
AFFECTED = "CREATE TEMP TABLE affected (id INTEGER PRIMARY KEY)"
"""Of the connection that writes."""

_SAME = (
    "o.grp = n.grp AND o.member = n.member AND o.step IS n.step AND o.incarnation IS n.incarnation "
    "AND o.rank IS n.rank AND o.phase IS n.phase AND o.kind = n.kind"
)
"""Lines of one place of a group: those of its attempts, and of their branches."""
NEW_AFFECTED = (
    "INSERT OR IGNORE INTO affected SELECT id FROM lines WHERE id > ?1 AND kind != 'damaged'",
    f"INSERT OR IGNORE INTO affected SELECT o.id FROM lines n JOIN lines o ON {_SAME} WHERE n.id > ?1 AND o.id <= ?1",
)
"""The lines after an id are new; older lines of the same places are affected."""
FATE_AFFECTED = "INSERT OR IGNORE INTO affected SELECT id FROM lines WHERE grp = ? AND incarnation IS ?"
ALL_AFFECTED = "INSERT OR IGNORE INTO affected SELECT id FROM lines WHERE kind != 'damaged'"
_FATE = "FROM fates f WHERE f.grp = n.grp AND f.incarnation = n.incarnation"
_OWN_FATE = f"{_FATE} AND f.start_step = n.step"

SETTLE = (
    # is_asynchronous() is that of the run.
    f"""UPDATE lines AS n SET
        fate = CASE
            WHEN kind IN ('untrained', 'held-out') THEN kind
            WHEN step IS NULL OR NOT is_asynchronous() THEN ''
            ELSE coalesce((SELECT f.fate {_OWN_FATE}), 'playing') END,
        used = CASE
            WHEN kind IN ('untrained', 'held-out') OR step IS NULL THEN NULL
            WHEN NOT is_asynchronous() THEN step
            ELSE (SELECT f.step {_OWN_FATE}) END,
        episode = CASE WHEN session = '' THEN id ELSE (
            SELECT min(o.id) FROM lines o WHERE {_SAME} AND o.attempt = n.attempt AND o.session != '') END,
        is_replaced = EXISTS (SELECT 1 FROM lines o WHERE {_SAME} AND (o.attempt > n.attempt OR (
            o.attempt = n.attempt AND n.step IS NOT NULL AND n.session = '' AND o.session = '' AND o.time > n.time)))
        WHERE id IN (SELECT id FROM affected)""",
    # Groups that a resumed run, or a rollout process that was launched again, plays anew are lost. So are steps after
    # the checkpoint.
    f"""UPDATE lines AS n SET
        place = CASE
            WHEN phase IN ('before', 'after') THEN phase
            WHEN fate = 'held-out' AND step >= 0 THEN '{HELD_OUT_PLACE}' || step
            WHEN fate IN ('untrained', 'held-out', 'playing', 'dropped') THEN fate
            WHEN used IS NOT NULL THEN CAST(used AS TEXT)
            ELSE '-' END,
        used = CASE WHEN fate = 'dropped' THEN NULL ELSE used END,
        is_lost = CASE
            WHEN step IS NULL THEN 0
            WHEN fate = 'playing' THEN was_ended(incarnation) OR EXISTS (SELECT 1 {_FATE})
            WHEN kind = 'held-out' THEN was_repeated(step - 1, incarnation)
            ELSE was_repeated(coalesce(used, step), incarnation) END,
        began = coalesce(clock, {{clock}}) + first,
        ended = coalesce(clock, {{clock}}) + last
        WHERE id IN (SELECT id FROM affected)""".format(
        # In files of earlier versions, the waits of a synchronous run count from the begin of its step.
        clock="CASE WHEN NOT is_asynchronous() THEN (SELECT b.time FROM begun b WHERE b.step = n.step "
        "AND b.incarnation = n.incarnation) END"
    ),
    "DELETE FROM episodes WHERE id IN (SELECT id FROM affected)",
    f"""INSERT OR REPLACE INTO episodes ({", ".join(EPISODE)})
        SELECT h.id, {", ".join(f"h.{name}" for name in _HEAD)}, {", ".join(f"a.{name}" for name in _SUMS)},
            {", ".join(_JUDGED.values())}
        FROM (SELECT episode, {", ".join(f"{value} AS {name}" for name, value in _SUMS.items())} FROM lines
            WHERE episode IN (SELECT DISTINCT l.episode FROM affected n CROSS JOIN lines l ON l.id = n.id)
            GROUP BY episode) a
        JOIN lines h ON h.id = a.episode""",
    "DELETE FROM affected",
)
"""Settles the affected lines, and makes their episodes anew."""

FORGET = (
    "INSERT OR IGNORE INTO affected SELECT o.id FROM lines n JOIN lines o ON "
    f"{_SAME} WHERE n.file = ?1 AND o.file != ?1",
    "DELETE FROM episodes WHERE id IN (SELECT episode FROM lines WHERE file = ?1)",
    "DELETE FROM lines WHERE file = ?1",
    "DELETE FROM trained WHERE file = ?1",
    "DELETE FROM sources WHERE file = ?1",
)
"""Removes the rows of a file. `SETTLE` follows, for lines of other files."""
