"""What a resumed run does when something has changed that it began with: one test for each row of docs/resume.md."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.helpers import put_in_cache
from tests.train import tiny
from weft.checkpoints import save_model_dir
from weft.checkpoints.config import CONFIG, WEIGHTS
from weft.checkpoints.hub import create_model
from weft.cli import main
from weft.errors import CheckpointError, DataError, UsageError
from weft.machine.runtime import Runtime
from weft.runs.directory import PUBLIC_CLASSIFIER
from weft.train import environment, loop, resume, train
from weft.train.state import load_state, newest_step, sha256_of_tensors

LEVIT = {"model": "levit_nano_32", **tiny.ARGUMENTS["levit_nano_32"]}
Capture = pytest.CaptureFixture[str]


class Killed(BaseException):
    """Stands for `kill -9`."""


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise")


def whole(data: Path, out: Path, **settings: Any) -> Path:
    train(data, settings={**tiny.EVERYTHING, **LEVIT, **settings}, out=out, quiet=True)
    return out


def stopped(data: Path, out: Path, **settings: Any) -> Path:
    """A run that was killed after its third step."""
    learn = loop.Learner.train_step

    def fatal(self: loop.Learner, *args: Any) -> loop.StepResult:
        if self.step == 3:
            raise Killed
        return learn(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Learner, "train_step", fatal)
        with pytest.raises(Killed):
            whole(data, out, **settings)
    return out


@pytest.fixture(scope="session")
def reference(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    return whole(photos, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="session")
def _stopped(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped(photos, tmp_path_factory.mktemp("stopped") / "run")


@pytest.fixture
def out(_stopped: Path, tmp_path: Path) -> Path:
    """A copy of a run that was stopped."""
    return shutil.copytree(_stopped, tmp_path / "run")


def edit_records(out: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change what the states of a run say, as another machine would have written them."""
    for state in (out / "state").glob("step-*.safetensors"):
        record = tiny.record_of(state)
        edit(record)
        tiny.reseal(state, record)


# Data


@pytest.fixture
def data(photos: Path, tmp_path: Path) -> Path:
    shutil.copytree(photos, tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: (data / "class1" / "003.png").unlink(), r"1 image gone \(class1/003.png\)"),
        (lambda data: shutil.copy(data / "class0" / "000.png", data / "class0" / "new.png"), "1 image new"),
        (lambda data: shutil.copy(data / "class0" / "000.png", data / "class0" / "001.png"), "1 image changed"),
        (lambda data: (data / "class1").rename(data / "other"), r"1 class gone \(class1\), 1 class new \(other\)"),
    ],
    ids=["gone", "new", "changed", "class"],
)
def test_other_data_is_refused(change: Callable[[Path], Any], message: str, data: Path, out: Path) -> None:
    change(data)
    with pytest.raises(DataError, match=rf"needs the data that it started with; .*{message}"):
        train(data, resume=out, quiet=True)


# Settings


def test_an_edited_recipe_is_as_another_setting(out: Path, capfd: Capture) -> None:
    text = (out / "recipe.yaml").read_text()
    (out / "recipe.yaml").write_text(text.replace("label_smoothing: 0.1", "label_smoothing: 0.3"))
    with pytest.raises(UsageError, match=r"loss.label_smoothing is 0.1, got 0.3. Pass --override"):
        train(resume=out, quiet=True)
    train(resume=out, override=True)
    assert "loss.label_smoothing changes from 0.1 to 0.3 from here on." in capfd.readouterr().err
    train(resume=out, quiet=True)  # what was taken over is what the run does


def test_a_setting_that_was_taken_over_stays_after_a_kill(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fatal(*args: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop.Learner, "train_step", fatal)
        with pytest.raises(Killed):
            train(resume=out, settings={"optim.lr": 0.5}, override=True, quiet=True)
    assert json.loads(load_state(out / "state")[0].recipe["optim.lr"]) == 0.5
    train(resume=out, quiet=True)


@pytest.mark.slow_except("save.every_steps")
@pytest.mark.parametrize("key", resume.FREE)
def test_settings_on_which_no_result_depends(key: str, reference: Path, out: Path, data: Path) -> None:
    value = {"data.source": data, "device": "auto", "save.keep": 3}.get(key, 1)
    train(resume=out, settings={key: str(value)}, quiet=True)
    if key == "device" and torch.cuda.is_available():
        return
    tiny.assert_same_run(reference, out)


OTHERS = {"start_from": "elsewhere", "pretrained": True, "data.val_fraction": 0.5, "optim.opt": "sgd"}


@pytest.mark.parametrize("key", ["seed", "data.seed", "batch_size", *OTHERS])
def test_settings_that_no_run_can_change(key: str, out: Path) -> None:
    value = OTHERS.get(key, 6)
    with pytest.raises(UsageError, match=f"A resumed run cannot change its {key}"):
        train(resume=out, settings={key: value}, override=True, quiet=True)


@pytest.mark.parametrize(("key", "value"), [("precision", "bf16"), ("accumulate", 1), ("distill.alpha", 0.9)])
def test_settings_that_are_taken_over_only_when_meant(key: str, value: Any, out: Path) -> None:
    with pytest.raises(UsageError, match=f"{key} is .* Pass --override"):
        train(resume=out, settings={key: value}, quiet=True)


@pytest.mark.parametrize(("key", "value"), [("optim.weight_decay", 0.0), ("optim.layer_decay", 0.9)])
def test_a_run_goes_on_with_other_groups_of_weights(
    key: str, value: float, reference: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments are those of each weight, whatever group of the optimizer it is in."""
    moments, restored, groups = load_state(out / "state")[1], {}, []
    restore = loop.Learner.restore

    def look(self: loop.Learner, *saved: Any) -> None:
        restore(self, *saved)
        restored.update({name: tensor.clone() for name, tensor in self.state()[0].items()})
        groups.extend((group["weight_decay"], group.get("lr_scale", 1.0)) for group in self.optimizer.param_groups)

    monkeypatch.setattr(loop.Learner, "restore", look)
    train(resume=out, settings={key: value}, override=True, quiet=True)
    assert restored.keys() == moments.keys()
    assert all(torch.equal(restored[name], moments[name]) for name in moments)
    assert any(name.endswith("exp_avg") for name in moments)
    decays, scales = zip(*groups, strict=True)
    assert set(decays) == {0.0} if key == "optim.weight_decay" else len(set(scales)) > 1
    assert newest_step(out / "state") == tiny.STEPS
    with pytest.raises(AssertionError, match="tensors differ"):
        tiny.assert_same_run(reference, out)


# Weights to start from


@pytest.mark.slow
def test_weights_to_start_from_are_read_once(photos: Path, tmp_path: Path) -> None:
    before = whole(photos, tmp_path / "before", epochs=1, seed=7)
    reference = whole(photos, tmp_path / "whole", start_from=str(before))
    out = stopped(photos, tmp_path / "run", start_from=str(before))
    shutil.rmtree(before)
    train(resume=out, quiet=True)
    tiny.assert_same_run(reference, out)


@pytest.mark.slow
def test_public_weights_are_read_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    source = timm.create_model("resnet10t")
    put_in_cache(tmp_path / "hub", "timm/resnet10t.c3_in1k", "model.safetensors", source.state_dict())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = {**tiny.EVERYTHING, "model": "resnet10t", "img_size": 32, "pretrained": True}
    monkeypatch.setattr("tests.train.test_resume_inputs.LEVIT", {})
    reference = whole(photos, tmp_path / "whole", **settings)
    out = stopped(photos, tmp_path / "run", **settings)
    shutil.rmtree(tmp_path / "hub")
    stored = out / PUBLIC_CLASSIFIER
    content = stored.read_bytes()
    stored.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match="must be the file that the run wrote"):
        train(resume=out, quiet=True)
    stored.write_bytes(content)
    train(resume=out, quiet=True)
    tiny.assert_same_run(reference, out)


# Teacher


def make_teacher(folder: Path, seed: int, **arguments: Any) -> Path:
    torch.manual_seed(seed)
    model = create_model("levit_nano_32", num_classes=3, depth=[1, 1, 1], **arguments)
    return save_model_dir(model, folder, force=True)


def shift_weight(teacher: Path) -> None:
    """The last bit of one weight."""
    state = load_file(teacher / WEIGHTS)
    state["head.linear.bias"][0] = torch.nextafter(state["head.linear.bias"][0], torch.tensor(9.0))
    save_file(state, teacher / WEIGHTS)
    edit_config(teacher, weights_sha256=hashlib.sha256((teacher / WEIGHTS).read_bytes()).hexdigest())


def edit_config(teacher: Path, **values: Any) -> None:
    config = json.loads((teacher / CONFIG).read_text())
    (teacher / CONFIG).write_text(json.dumps(config | values))


def brighten(teacher: Path) -> None:
    config = json.loads((teacher / CONFIG).read_text())
    edit_config(teacher, pretrained_cfg=config["pretrained_cfg"] | {"mean": [0.4, 0.4, 0.4]})


CHANGES = {
    "weights": (shift_weight, "its weights_sha256 was [0-9a-f]{64} and is now [0-9a-f]{64}"),
    "preprocessing": (brighten, r"its preprocessing was .*0\.485.* and is now .*0\.4,"),
    "architecture": (lambda teacher: make_teacher(teacher, 1, act_layer="gelu"), "its architecture was .* and is now"),
}


@pytest.mark.slow_except("weights-False")
@pytest.mark.parametrize(("change", "cache"), [("weights", True), *((change, False) for change in CHANGES)])
def test_another_teacher_is_refused(change: str, cache: bool, photos: Path, tmp_path: Path, capfd: Capture) -> None:
    teacher = make_teacher(tmp_path / "teacher", seed=1)
    fixed = {"augment.mixup": 0, "augment.cutmix": 0, "augment.rand_augment": "null", "augment.erase_prob": 0,
             "augment.crop": "none", "augment.hflip": False, "augment.color_jitter": 0} if cache else {}  # fmt: skip
    settings = {"distill.teacher": str(teacher), "distill.cache": cache, **fixed}
    reference = whole(photos, tmp_path / "whole", **settings)
    out = stopped(photos, tmp_path / "run", **settings)
    kept = shutil.copytree(teacher, tmp_path / "kept")
    alter, message = CHANGES[change]
    alter(teacher)
    step = newest_step(out / "state")
    assert main(["train", "--resume", str(out), "--quiet"]) == DataError.exit_code
    output = capfd.readouterr().err
    assert "A resumed run needs the teacher that it started with" in output
    assert re.search(message, output), output
    assert newest_step(out / "state") == step
    shutil.rmtree(teacher)
    kept.rename(teacher)
    train(resume=out, quiet=True)
    tiny.assert_same_run(reference, out)


def test_another_teacher_on_purpose(photos: Path, tmp_path: Path, capfd: Capture) -> None:
    first, second = make_teacher(tmp_path / "first", seed=1), make_teacher(tmp_path / "second", seed=2)
    out = stopped(photos, tmp_path / "run", **{"distill.teacher": str(first)})
    train(resume=out, settings={"distill.teacher": str(second)}, override=True)
    note = f"distill.teacher changes from {first} to {second} from here on."
    assert note in capfd.readouterr().err.replace("\n", " ")
    record = load_state(out / "state")[0].teacher
    assert record["weights_sha256"] == sha256_of_tensors(load_file(second / WEIGHTS))


def test_a_teacher_that_is_gone_is_refused(photos: Path, tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher", seed=1)
    out = stopped(photos, tmp_path / "run", **{"distill.teacher": str(teacher)})
    shutil.rmtree(teacher)
    with pytest.raises(CheckpointError, match=r"A teacher must be a model name or a model directory; .*is neither"):
        train(resume=out, quiet=True)


def test_the_hash_of_weights_is_of_names_dtypes_shapes_and_bytes() -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1), "c": torch.ones(2, dtype=torch.bfloat16)}
    others = [
        {**state, "a": state["a"].reshape(3, 2)},
        {**state, "a": state["a"].view(torch.int32)},
        {**state, "a": state["a"] + 0.5},
        {("d" if name == "a" else name): tensor for name, tensor in state.items()},
        {name: tensor for name, tensor in state.items() if name != "c"},
    ]
    assert len({sha256_of_tensors(one) for one in [state, *others]}) == 6
    assert sha256_of_tensors(dict(reversed(state.items()))) == sha256_of_tensors(state)
    assert sha256_of_tensors({**state, "a": state["a"].t().contiguous().t()}) == sha256_of_tensors(state)


# Machine


def notes_of(out: Path) -> list[str]:
    """What is told when a run is resumed here."""
    return resume.open_run(out, (), override=False).notes(Runtime.of("cpu"))


@pytest.mark.parametrize("key", ["weft", "python", "torch", "torchvision", "timm", "numpy", "pillow", "device"])
def test_another_version_or_machine_is_told(key: str, out: Path) -> None:
    assert notes_of(out) == []
    edit_records(out, lambda record: record["machine"].update({key: "other"}))
    now = environment.machine(Runtime.of("cpu"))[key]
    assert notes_of(out) == [f"{key} was other and is now {now}: the result may differ in the last bits."]


@pytest.mark.parametrize("name", environment.VARIABLES)
def test_a_variable_that_chooses_algorithms_is_told(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was = yaml.safe_load((out / "recipe.yaml").read_text())["environment"][name]
    monkeypatch.setenv(name, "0")
    assert notes_of(out) == [f"{name} was {was} and is now 0: the result may differ in the last bits."]


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="there are no others")
def test_other_instructions_are_told(out: Path) -> None:
    """By PyTorch's own variable, as on a processor that has fewer."""
    code = (
        "import sys; from weft.train import resume; from weft.machine.runtime import Runtime; from pathlib import Path;"
        "print(resume.open_run(Path(sys.argv[1]), (), override=False).notes(Runtime.of('cpu')))"
    )
    output = tiny.fresh([sys.executable, "-c", code, str(out)], ATEN_CPU_CAPABILITY="default").stdout
    assert "and is now DEFAULT: the result may differ" in output


def test_variables_that_name_places_have_no_effect(
    reference: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "WEFT_DATA"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    train(resume=out, quiet=True)
    tiny.assert_same_run(reference, out)
    assert os.listdir(tmp_path / "HOME") == []
