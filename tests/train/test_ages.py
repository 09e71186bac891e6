"""Ages follow the versions of the tokens, which the server writes."""

from __future__ import annotations

from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.ages import Ages, describe_ages
from verl_server.weight_version import WeightVersion

TRAINED = WeightVersion(12, "5f2c9a1e")


def episode(*labels: str, name: str = "a", session: str | None = None) -> Trajectory:
    trajectory = Trajectory(task=Task(seed=0, group=0, episode_id=name), session=session)
    trajectory.append_observation({}, [1, 2])
    trajectory.append_output([3] * len(labels), [-1.0] * len(labels), list(labels))
    trajectory.finish(StopReason.DONE)
    return trajectory


def test_the_oldest_token_gives_the_age_and_its_versions_the_span() -> None:
    groups = [
        [episode("12@5f2c9a1e", name="a"), episode("11@5f2c9a1e", "12@5f2c9a1e", "12@5f2c9a1e", name="b")],
        [episode("2@5f2c9a1e", "3@5f2c9a1e", "12@5f2c9a1e", name="c"), episode("11@5f2c9a1e", name="d")],
    ]
    ages = describe_ages(groups, TRAINED)
    assert ages == Ages(ages={"0": 1, "1": 2, "10": 1}, spans={"1": 2, "2": 1, "3": 1})
    assert list(ages.ages) == ["0", "1", "10"]
    assert (ages.mean, ages.largest) == (3.0, 10)


def test_episodes_whose_versions_have_no_order_are_left_out() -> None:
    groups = [[episode("11@aaaaaaaa"), episode("11@5f2c9a1e", "11@aaaaaaaa", name="b"), episode("final", name="c")]]
    assert describe_ages([*groups, [episode(name="d")]], TRAINED) == Ages()
    assert (Ages().mean, Ages().largest) == (None, None)


def test_ages_are_listed_in_the_order_of_their_numbers() -> None:
    labels = [f"{12 - age}@5f2c9a1e" for age in (10, 2, 9)]
    ages = describe_ages([[episode(label, name=label) for label in labels]], TRAINED)
    assert list(ages.ages) == ["2", "9", "10"]
