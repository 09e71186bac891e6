"""Episodes of a guessing game with their texts and tokens: what the recorded runs of the browser tests consist of.

Nobody samples them from a model. `skill` is the share of the guesses that halve the range.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from verl_server.rollout.trajectory import Event, Fault, StopReason, Task, Trajectory
from verl_server.watch.run_records import TrainedTrajectory

HIGHEST = 100
TRIES = 7
RULES = "Guess my number from 1 to 100. You have seven tries."
END = "<|end|>"
_TEXTS = (RULES, "I try.", "It is larger.", "It is smaller.", "Correct!", "No tries are left.", "think about it again")
_PIECES = re.compile(r" ?[A-Za-z]+| ?\d+|[^\w\s]")
VOCABULARY = {
    piece: number
    for number, piece in enumerate(
        dict.fromkeys(
            [END]
            + [piece for text in _TEXTS for piece in _PIECES.findall(text)]
            + [f"{space}{number}" for number in range(HIGHEST + 1) for space in ("", " ")]
        )
    )
}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json that decodes the tokens of these episodes."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {piece.replace(" ", "\u0120"): number for piece, number in VOCABULARY.items()}
    tokenizer = Tokenizer(BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))


def tokens_of(text: str) -> list[int]:
    return [VOCABULARY[piece] for piece in _PIECES.findall(text)]


def play(draw: random.Random, task: Task, *, skill: float, version: str, began: float) -> Trajectory:
    """Return an episode. The number to guess depends on the task's seed alone."""
    number = random.Random(task.seed).randint(1, HIGHEST)
    t = Trajectory(task=task, member=task.member, began=began)
    low, high, clock, said = 1, HIGHEST, draw.uniform(0.0, 3.0), RULES
    t.events.append(Event("queue", 0.0, clock))
    for _ in range(TRIES):
        halves = draw.random() < skill and low <= high
        guess = (low + high) // 2 if halves else draw.randint(1, HIGHEST)
        text = f"I try {guess}."
        answered = clock + draw.uniform(0.1, 0.5)
        t.append_observation({"text": said}, tokens_of(said))
        sampled = [*tokens_of(text), VOCABULARY[END]]
        logprobs = [round(-draw.expovariate(1.0 + 6.0 * skill), 6) for _ in sampled]
        t.append_output(sampled, logprobs, [version] * len(sampled))
        spoken = answered + draw.uniform(0.4, 1.6)
        t.events += [Event("env", clock, answered), Event("generate", answered, spoken)]
        clock = spoken
        t.turns[-1].action, t.turns[-1].finish_reason = {"text": text}, "stop"
        t.turns[-1].reward = float(guess == number)
        if guess == number:
            break
        said = "It is larger." if guess < number else "It is smaller."
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
    won = bool(t.turns[-1].reward)
    t.final_observation = {"text": "Correct!" if won else "No tries are left."}
    t.finish(StopReason.DONE if won else StopReason.MAX_TURNS)
    t.fault = Fault.POLICY
    return t


def fail(draw: random.Random, task: Task, *, version: str, began: float, error: str, attempt: int = 0) -> Trajectory:
    """Return an episode that ended because its environment did not answer."""
    t = play(draw, task, skill=0.0, version=version, began=began)
    t.reward, t.stop_reason, t.fault, t.error, t.attempt = (
        None,
        StopReason.ENV_ERROR,
        Fault.INFRASTRUCTURE,
        error,
        attempt,
    )
    return t


def train(draw: random.Random, t: Trajectory, step: int, baseline: float, *, entropy: float) -> TrainedTrajectory:
    """Return what a trainer records for an episode, whose log-probabilities differ a little from the server's."""
    positions = [place for place, mask in enumerate(t.loss_mask) if mask]
    gaps = [round(draw.gauss(0.0, 0.004), 6) for _ in positions]
    return TrainedTrajectory(
        step=step,
        sampled_step=step,
        group=t.task.group,
        member=t.member,
        attempt=t.attempt,
        advantage=round((t.reward or 0.0) - baseline, 4),
        age=0,
        positions=positions,
        logprobs=[round(t.logprobs[place] + gap, 6) for place, gap in zip(positions, gaps, strict=True)],
        entropy=[round(entropy * draw.uniform(0.5, 1.5), 6) for _ in positions],
        gap_mean=sum(map(abs, gaps)) / len(gaps),
        gap_max=max(map(abs, gaps)),
    )
