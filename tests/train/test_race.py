"""The images choose the network that training starts from, and chance does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train import tiny
from weft.cli import main
from weft.errors import CheckpointError, UsageError
from weft.models.building import create_model
from weft.train import candidates, decisions, race, train
from weft.train.plan import Plan, make_plan
from weft.train.request import Request

QUALITY = {"good": 1.0, "bad": 0.0, "as good": 1.0, "slow": 1.0, "unlike": 1.0}
"""Share of the class in the features of a network."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.coloured(tmp_path_factory.mktemp("data") / "photos", per_class=20)


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks whose features tell the class or nothing, and whose time is that of their name."""

    def build(recipe: Any, num_classes: int) -> Any:
        network: Any = create_model("levit_nano_32", num_classes=num_classes)
        network.nickname = recipe.model
        if recipe.model == "absent":
            raise CheckpointError("The weights must be in the cache.")
        return network

    def features(network: Any, batches: Any, *_: Any, **__: Any) -> tuple[list[np.ndarray], np.ndarray]:
        labels = np.array(batches.dataset.source.labels)
        random = np.random.default_rng(len(network.nickname))
        rows = 6 * QUALITY[network.nickname] * np.eye(8)[labels] + random.normal(size=(len(labels), 8))
        return [rows[:, None].astype(np.float32)], labels

    monkeypatch.setattr(race, "build_model", build)
    monkeypatch.setattr(race, "read_features", features)
    monkeypatch.setattr(race, "licence_of", lambda name: f"licence of {name}")
    monkeypatch.setattr(race, "_seconds", lambda network, _: 0.01)
    monkeypatch.setattr(race, "fastest", lambda network, _: network)
    monkeypatch.setattr(decisions, "is_reachable", lambda: True)
    monkeypatch.setattr(decisions, "is_cached", lambda name: True)


def planned(photos: Path, monkeypatch: pytest.MonkeyPatch, known: dict[str, float], **more: Any) -> Plan:
    monkeypatch.setattr(race.families, "START_NETWORKS", {"cpu": known, "cuda": {}})
    monkeypatch.setattr("weft.train.plan.check_name", lambda name: name)
    return make_plan(Request(photos, given={"device": "cpu"}, **more))


def chosen(plan: Plan) -> str:
    [name] = [one.model for one in plan.candidates if one.is_chosen]
    assert plan.recipe.model == name
    return name


@pytest.mark.parametrize("names", [("good", "bad"), ("bad", "good")])
def test_the_best_is_chosen_whatever_imagenet_says(
    names: tuple[str, ...], photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = race.raced(planned(photos, monkeypatch, dict(zip(names, (70.0, 90.0), strict=True))))
    assert chosen(plan) == "good"
    assert [one.model for one in plan.candidates] == list(names)
    good = next(one for one in plan.candidates if one.model == "good")
    assert good.accuracy.value > 95
    assert good.images == len(plan.splits.train)
    assert "good: " in (printed := capsys.readouterr().err)
    assert f"% by probe on {good.images} images, 10.0 ms an image, licence of good." in printed
    assert plan.notes[-1] == "Model good, the most accurate by probe. Another: --model NAME."


def test_what_chance_may_have_decided_is_weighed_against_imagenet(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two networks that are about as good here, and of which nothing is known, the probe decides."""
    probed, right = race._probed, {"good": 55, "as good": 54}

    def nearly(plan: Plan, name: str, places: Any) -> Any:
        result, _, groups = probed(plan, name, places)
        values = np.zeros(60)
        values[-right[name] :] = 1
        assert result is not None
        accuracy = race.accuracy_of(right[name], 60)
        return result._replace(accuracy=accuracy), values, groups

    monkeypatch.setattr(race, "_probed", nearly)
    assert chosen(race.raced(planned(photos, monkeypatch, {"good": 70.0, "as good": 90.0}))) == "as good"
    assert chosen(race.raced(planned(photos, monkeypatch, {"good": 90.0, "as good": 90.0}))) == "good"
    monkeypatch.setitem(right, "as good", 30)
    assert chosen(race.raced(planned(photos, monkeypatch, {"good": 70.0, "as good": 90.0}))) == "good"
    monkeypatch.setitem(right, "as good", 54)
    plan = planned(photos, monkeypatch, {}, candidates=("as good", "good"))
    assert chosen(race.raced(plan)) == "good"


def test_clearly_worse_networks_take_part_in_the_first_round_only(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "ROUNDS", (24, 36))
    plan = race.raced(planned(photos, monkeypatch, {"good": 70.0, "bad": 90.0, "as good": 70.0}))
    assert {one.model: one.images for one in plan.candidates} == {"good": 36, "bad": 24, "as good": 36}


def test_weights_that_cannot_be_had_are_left_out_unless_they_are_named(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"absent": 80.0, "good": 70.0}
    assert chosen(race.raced(planned(photos, monkeypatch, known))) == "good"
    assert "absent is left out: The weights must be in the cache." in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="must be in the cache"):
        race.raced(planned(photos, monkeypatch, known, candidates=("absent", "good")))
    alone = planned(photos, monkeypatch, {"absent": 80.0})
    assert race.raced(alone) is alone


def test_a_network_that_is_named_does_not_compete(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"good": 70.0, "bad": 60.0}
    for more in ({"recipe": "finetune", "settings": {"model": "levit_128s"}}, {"from_scratch": True}):
        plan = planned(photos, monkeypatch, known, **more)
        assert race.raced(plan) is plan
        with pytest.raises(UsageError, match="--candidates needs a network with public weights that is left to weft"):
            race.raced(dataclasses.replace(plan, request=dataclasses.replace(plan.request, candidates=("good",))))
    assert chosen(race.raced(planned(photos, monkeypatch, known, recipe="probe"))) == "good"


def test_images_in_groups_are_held_out_together(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(photos, monkeypatch, {"good": 70.0, "bad": 60.0}, settings={"data.group": r"(\d)\.\w+$"})
    asked = list[Any]()
    held_out_right = race.held_out_right

    def grouped(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return held_out_right(*arguments)

    monkeypatch.setattr(race, "held_out_right", grouped)
    found = race.raced(plan).candidates
    assert all(sorted(groups) == sorted(plan.splits.groups or ()) for groups in asked)
    assert found[0].accuracy != race.accuracy_of(
        round(found[0].accuracy.value * found[0].images / 100), found[0].images
    )


def test_images_that_do_not_suffice_choose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tiny.coloured(tmp_path / "photos", per_class=2), monkeypatch, {"good": 70.0, "bad": 60.0})
    assert len(plan.splits.train) == 3  # one of each class
    assert race.raced(plan) is plan


def test_the_table_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "candidates.csv"
    assert candidates.read_candidates(file) == []
    found = [
        race.ProbedNetwork("one", 500, race.accuracy_of(300, 400), 1.25, "mit", is_chosen=True),
        race.ProbedNetwork("two", 1_500, race.accuracy_of(301, 400), 22.0, "apache-2.0"),
    ]
    candidates.write_candidates(file, found)
    assert candidates.read_candidates(file) == found
    file.write_text("model,images\none,many\n")
    with pytest.raises(CheckpointError, match=r"candidates\.csv must be the file that the run wrote"):
        candidates.read_candidates(file)


def test_candidates_exclude_a_named_start(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--plan"], ["--find-lr"], ["--preview", "seen.png"]):
        assert main(["train", str(photos), "--candidates", "good,bad", *more]) == 2
        assert f"{more[0]} trains nothing, and --candidates is for a training run" in capsys.readouterr().err
    assert main(["train", str(photos), "--candidates", "resnet18,resnet81"]) == 2
    assert "resnet81" in capsys.readouterr().err
    for more in (["--model", "levit_128s"], ["--from-scratch"], ["--from", "run"], ["--resume", "run"]):
        assert main(["train", str(photos), "--candidates", "good,bad", *more]) == 2
        assert "--candidates excludes --model, --from, --from-scratch and --resume" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--candidates needs a network"):
        train(photos, recipe="small_images", candidates=["resnet18"], epochs=1, quiet=True)
