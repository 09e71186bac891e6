"""The answers of the page's server, as JSON. `views` make them, `app` sends them, the page's scripts read them.

Each module has the answers that one module of views fills, and says which one; `values` has what several of them use.
Rules for all of them:

- `Number` is a finite number, one of the texts "NaN", "Infinity" and "-Infinity", or null if there is none.
- Seeds and ids are texts, because a script's numbers have 53 bits. Times are wall times, in seconds since 1970, unless
  the field says otherwise.
- A text of a model, an environment or an error has control characters, lone surrogates and marks of the writing
  direction as visible characters. It is never HTML.
- `Step` is the number of the step that used an episode, or the name of another place: "-" (a run without steps),
  "playing" and "dropped" (groups of an asynchronous run that no step used), "untrained" (of a step that the run did not
  complete), "held-out-N" (the evaluation at step N), "before" and "after" (the demo's evaluations).
- An answer has at most 1 MB. A list that does not fit goes on at `next`: the same URL with `after` set to its value. A
  null `next` is the end.
- An error has a status of 400 or more, and `ErrorAnswer` as its body.

The URLs have their parameters in alphabetical order, without those that have their default. A script that builds them
so finds the answers of an export, which are stored by URL.

    /api/runs                                       Runs
    /api/runs/RUN                                   RunSettings
    /api/runs/RUN/metrics?from&names&points&to      Metrics
    /api/runs/RUN/events?after&kinds                Events
    /api/runs/RUN/advisories                        Advisories
    /api/runs/RUN/evaluations?after                 Evaluations
    /api/runs/RUN/lanes?from&rows&to                Lanes
    /api/runs/RUN/steps?after&from&to               Steps
    /api/runs/RUN/steps/STEP?after&sort&FILTERS     StepGroups
    /api/runs/RUN/compare?a&after&b&with            Comparison
    /api/runs/RUN/episodes?after&order&q&FILTERS    Episodes
    /api/runs/RUN/episodes/ROW?after                Episode
    /api/runs/RUN/episodes/ROW/text?part&start&turn TextPart
    /api/runs/RUN/episodes/ROW/tokens?start         Tokens
    /api/live                                       a stream of server-sent events; the data of each is a `Live`

FILTERS, each of which may be left out: `error=1` (with an error), `fault`, `from` and `to` (steps), `group`, `lost=1`
(lost steps, too), `reward_from`, `reward_to`, `step` (a Step; not where the path has one), `stop` (stop reason),
`tokens_from`, `tokens_to`, `tool`, `version`.
"""
