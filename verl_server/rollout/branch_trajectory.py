"""`branch_trajectory`: a branch of a session as a `Trajectory`.

`rollout.agents.branches` calls it for episodes of agents, and adds what the run knows of them. `watch.index` calls it
for the sessions in a server's store.
"""

from __future__ import annotations

from verl_server.messages.session_types import Branch
from verl_server.rollout.trajectory import Task, Trajectory, Turn


def branch_trajectory(branch: Branch, task: Task) -> Trajectory:
    """Return the tokens, turns and descent of a branch. Its reward, its end and its times are not set."""
    versions = [""] * len(branch.ids)
    for span in branch.weight_versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    turns = [
        Turn(
            observation={},
            observation_span=(turn.start, turn.prompt_end),
            action_span=(turn.prompt_end, turn.end),
            action={"calls": turn.calls} if turn.calls else {},
            finish_reason=turn.finish_reason,
            policy_logprobs=turn.policy_logprobs,
            sampling=turn.sampling,
            overridden=turn.overridden,
            began=turn.began,
            messages=turn.messages,
            reply=turn.reply,
        )
        for turn in branch.turns
    ]
    return Trajectory(
        task=task,
        tokens=list(branch.ids),
        loss_mask=list(branch.loss_mask),
        logprobs=list(branch.logprobs),
        policy_logprobs=list(branch.policy_logprobs or ()),
        has_choice=list(branch.has_choice or ()),
        weight_versions=versions,
        turns=turns,
        session=branch.session,
        parent=branch.session.rpartition(".")[0],  # the name of a sub-agent's session begins with its agent's
        branch=branch.branch,
        fork_of=branch.fork_of,
        shared=branch.shared_tokens,
    )
