"""Classes of one's own: registered, trained with, saved, found again, and refused in time and in a sentence."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unmask
from tiny import MakeConfig
from unmask.cli import run
from unmask.config import load_config
from unmask.corpora import Corpus, Document
from unmask.corpora.memory import Memory
from unmask.denoisers import Denoiser
from unmask.denoisers.network import Network
from unmask.errors import DataError, ModelFolderError, UnmaskError, UsageError
from unmask.metrics import Metric
from unmask.noise import Noise
from unmask.objectives.mdlm import MDLM
from unmask.reader import from_dict, to_dict
from unmask.registry import check_class


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for name in unmask._ROOMS:
        room = importlib.import_module(f"unmask.{name}").room
        monkeypatch.setattr(room, "_registered", dict(room._registered))


@dataclass(frozen=True, kw_only=True)
class Bent(Noise):
    """alpha = 1 - t^k, written from scratch."""

    k: float = 1.5

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t**self.k

    def dalpha(self, t: Tensor) -> Tensor:
        return -self.k * t ** (self.k - 1)

    def inverse(self, alpha: Tensor) -> Tensor:
        return (1 - alpha) ** (1 / self.k)


SOURCE = '''"""A schedule in a file of its own."""

from dataclasses import dataclass

from unmask.noise import Noise


@dataclass(frozen=True, kw_only=True)
class Bent(Noise):
    """alpha = 1 - t^k, written from scratch."""

    k: float = 1.5

    def alpha(self, t):
        return 1 - t**self.k

    def dalpha(self, t):
        return -self.k * t ** (self.k - 1)

    def inverse(self, alpha):
        return (1 - alpha) ** (1 / self.k)
'''


# --- register ---------------------------------------------------------------------------------------------------------


def test_a_registered_class_is_found_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unmask.register(Bent) is Bent
    assert unmask.register(Bent) is Bent  # twice is no conflict
    room = unmask.noise.room
    assert room.get("bent") is Bent is unmask.noise.Bent
    assert "bent" in room.names()
    assert "Bent" in dir(unmask.noise)
    assert "LogLinear" in dir(unmask.noise)
    assert room.summary("bent") == "alpha = 1 - t^k, written from scratch."
    (tmp_path / "recipe.toml").write_text('objective = { name = "mdlm", noise = { name = "bent", k = 2.5 } }')
    config = load_config(tmp_path / "recipe.toml", {"steps": "3"})
    assert config.objective == MDLM(noise=Bent(k=2.5))
    assert load_config(tmp_path / "recipe.toml", {"objective.noise.k": "4"}).objective == MDLM(noise=Bent(k=4.0))
    assert run(["plugins", "noise", "--json"]) == 0
    entry = next(one for one in json.loads(capsys.readouterr().out)["noise"] if one["name"] == "bent")
    assert (entry["class"], entry["options"][0]["default"]) == ("Bent", 1.5)


def test_a_name_may_be_chosen_and_a_taken_one_is_refused() -> None:
    @unmask.register(name="my_cosine")
    @dataclass(frozen=True)
    class Cosine(Bent):
        pass

    assert unmask.noise.room.name_of(Cosine()) == "my_cosine"
    with pytest.raises(UsageError, match="cosine"):
        unmask.register(Cosine, name="cosine")  # ours
    unmask.register(Bent)
    with pytest.raises(UsageError, match="bent"):
        unmask.register(Cosine, name="bent")  # somebody else's
    with pytest.raises(UsageError, match="name"):
        unmask.register(Cosine, name="No Name")
    unmask.register(Cosine, name="renamed")
    assert unmask.noise.room.name_of(Cosine) == "renamed"
    assert "my_cosine" not in unmask.noise.room.names()


def test_a_cell_that_is_run_again_replaces_its_class() -> None:
    def cell(power: float) -> type[Any]:
        @dataclass(frozen=True)
        class Mine(Bent):
            def alpha(self, t: Tensor) -> Tensor:
                return 1 - t**power

        return unmask.register(Mine)

    first, second = cell(1.0), cell(2.0)
    assert first is not second
    assert unmask.noise.room.get("mine") is second


def plain(**members: Any) -> type[Any]:
    return type("Plain", (Bent,), members)


@dataclass(frozen=True, kw_only=True)
class HoldsATensor(Bent):
    table: Tensor = torch.zeros(1)


@dataclass(frozen=True, kw_only=True)
class Hides(Bent):
    inner: int = dataclasses.field(default=3, init=False)


@dataclass(frozen=True, kw_only=True)
class Halved(Noise):
    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t


@pytest.mark.parametrize(
    ("cls", "noun"),
    [
        (Halved, "lacks dalpha, inverse"),
        (HoldsATensor, "table"),
        (Hides, "inner"),
        (plain(__annotations__={"width": int}, width=3), "dataclass"),
        (plain(__init__=lambda self: None), "dataclass"),
        (Noise, "subclass"),
        (dict, "plug-in"),
        (Bent(), "plug-in"),
    ],
    ids=str,
)
def test_what_a_plugin_lacks_is_told(cls: Any, noun: str) -> None:
    with pytest.raises(UsageError, match=noun) as error:
        unmask.register(cls)
    assert "\n" not in str(error.value)


def test_every_plugin_of_ours_would_pass() -> None:
    for name in unmask._ROOMS:
        room = importlib.import_module(f"unmask.{name}").room
        for plugin in room.names():
            check_class(room.get(plugin))


# --- through training -------------------------------------------------------------------------------------------------


def test_an_unregistered_object_trains_is_saved_and_missed_by_name(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(tmp_path / "run", steps=2, objective=MDLM(noise=Bent(k=2.0)))
    model = unmask.train(config, device="cpu")
    assert model.objective == config.objective
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["objective"]["noise"]
    assert saved == {"name": "bent", "class": f"{__name__}.Bent", "k": 2.0}
    assert unmask.load(tmp_path / "run", device="cpu").objective == config.objective
    model = unmask.train(dataclasses.replace(config, steps=3), resume=True, device="cpu")

    unmask.noise.room.discard("bent")  # as in another process
    for look in (lambda: unmask.load(tmp_path / "run"), lambda: load_config(tmp_path / "run")):
        with pytest.raises(UnmaskError, match=f"Bent.*{__name__}") as error:
            look()
        assert "\n" not in str(error.value)
        assert "unmask.register" in str(error.value)
    unmask.register(Bent)
    assert unmask.load(tmp_path / "run", device="cpu").generate(seed=1) == model.generate(seed=1)


def test_a_module_may_be_moved_between_run_and_resume(tmp_path: Path, make_config: MakeConfig) -> None:
    """Where a class was defined is for the sentence alone: a run goes on when the class has moved."""
    config = make_config(tmp_path / "run", steps=2, objective=MDLM(noise=Bent()))
    unmask.train(config, device="cpu")
    unmask.noise.room.discard("bent")
    moved = type("Bent", (Bent,), {"__module__": "elsewhere"})
    unmask.register(moved)
    again = dataclasses.replace(config, steps=3, objective=MDLM(noise=moved()))
    unmask.train(again, resume=True, device="cpu")


@dataclass(frozen=True, kw_only=True)
class Listed(Bent):
    marks: tuple[int, ...] = ()


class Bare(Corpus):
    def documents(self) -> Iterator[Document]:
        yield Document("a text")

    def fingerprint(self) -> str:
        return "bare"


def test_what_a_run_could_not_save_is_told_before_it_begins(tmp_path: Path, make_config: MakeConfig) -> None:
    @dataclass(frozen=True)
    class Cosine(Bent):
        pass

    cases = [
        ({"objective": MDLM(noise=HoldsATensor())}, "table"),
        ({"objective": MDLM(noise=Listed(marks=("a",)))}, "Listed"),  # type: ignore[arg-type]
        ({"objective": MDLM(noise=Listed(k=float("nan")))}, "Listed"),
        ({"objective": MDLM(noise=Cosine())}, "cosine"),
        ({"data": {"train": Bare()}}, "dataclass"),
    ]
    for number, (changes, noun) in enumerate(cases):
        out = tmp_path / str(number)
        with pytest.raises(UsageError, match=noun):
            unmask.train(make_config(out, **changes), device="cpu")
        assert not out.exists(), noun


# --- nothing in a file imports ----------------------------------------------------------------------------------------


def test_no_folder_or_recipe_imports_what_it_names(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "model"
    shutil.copytree(trained.model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["objective"] = {"name": "trap", "class": "trap.Trap"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match="Trap"):
        unmask.load(folder)
    for name, where in (("trap", "trap.Trap"), ("mdlm", "trap.Trap"), ("trap.Trap", "trap.Trap")):
        data = {"objective": {"name": name, "class": where}}
        (tmp_path / "recipe.json").write_text(json.dumps(data))
        if name == "mdlm":  # a class beside a name that is known says nothing
            assert load_config(tmp_path / "recipe.json").objective == MDLM()
        else:
            with pytest.raises(UsageError, match="trap"):
                load_config(tmp_path / "recipe.json")
    assert "trap" not in sys.modules
    for odd in ("x" * 300, "a b", "", 3, None, ["trap"], "trap\nTrap"):
        with pytest.raises(UsageError, match=r"class|unknown"):
            from_dict(Noise, {"name": "cosine", "class": odd})


# --- --plugin ---------------------------------------------------------------------------------------------------------


def test_the_command_line_takes_a_module_or_a_file(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bent_noise.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("bent_noise")
    unmask.train(make_config(tmp_path / "run", steps=1, objective=MDLM(noise=module.Bent())), device="cpu")
    unmask.noise.room.discard("bent")
    capsys.readouterr()

    words = ["generate", str(tmp_path / "run"), "--length", "8", "--device", "cpu"]
    assert run(words) == 1
    assert "bent_noise" in capsys.readouterr().err
    texts = []
    for line in (
        ["--plugin", "bent_noise", *words],
        [*words, "--plugin=bent_noise"],
        [*words, "--plugin", str(tmp_path / "bent_noise.py")],
    ):
        unmask.noise.room.discard("bent")
        assert run(line) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    # in a process that has never seen it, and from a file that is on no path
    line = [sys.executable, "-m", "unmask", *words, "--plugin", str(tmp_path / "bent_noise.py")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, texts[0]), done.stderr


def test_a_plugin_module_that_is_of_no_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hollow_plugin.py").write_text("x = 1\n")
    (tmp_path / "broken_plugin.py").write_text("1 / 0\n")
    for name in ("json.py", "a-b.py"):
        (tmp_path / name).write_text(SOURCE)
    for name, noun in (
        ("hollow_plugin", "no plug-in"),
        ("broken_plugin", "ZeroDivisionError"),
        ("no_such_module", "no module"),
        (str(tmp_path / "nowhere.py"), "no file"),
        (str(tmp_path / "json.py"), "another name"),
        (str(tmp_path / "a-b.py"), "letters"),
        ("", "needs the name"),
    ):
        assert run(["plugins", "--plugin", name]) == 2, name
        err = capsys.readouterr().err
        assert noun in err
        assert err.count("\n") == 1
    assert run(["plugins", "--pluginn=x"]) == 2
    assert "--plugin" in capsys.readouterr().err


# --- texts in memory --------------------------------------------------------------------------------------------------

TEXTS = [f"the cat sat on mat number {i}" for i in range(40)]


def test_texts_in_memory_are_trained_on_and_kept_as_a_fingerprint(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path / "run", steps=2, data={"train": Memory(texts=tuple(TEXTS))})
    unmask.train(config, device="cpu")
    recipe = (tmp_path / "run" / "recipe.json").read_text()
    assert "mat number" not in recipe
    assert Memory(texts=tuple(TEXTS)).sha256 in recipe
    again = dataclasses.replace(config, steps=3)
    unmask.train(again, resume=True, device="cpu")

    other = dataclasses.replace(config.data, train=Memory(texts=tuple(TEXTS[1:])))
    with pytest.raises(UsageError, match="sha256"):
        unmask.train(dataclasses.replace(again, steps=4, data=other), resume=True, device="cpu")
    for words in (["train", str(tmp_path / "run"), "--resume", "--steps", "4"], ["eval", str(tmp_path / "run")]):
        assert run([*words, "--device", "cpu"]) == 1
        assert "memory" in capsys.readouterr().err


def test_a_corpus_in_memory() -> None:
    corpus = Memory(texts=["a", Document("b", prompt="p", label=1)])  # type: ignore[arg-type]
    assert list(corpus.documents()) == [Document("a"), Document("b", prompt="p", label=1)]
    assert corpus.has_prompts
    assert not Memory(texts=("a",)).has_prompts
    assert corpus.fingerprint() != Memory(texts=("a", "b")).fingerprint()
    assert Memory(texts=("ab", "")).fingerprint() != Memory(texts=("a", "b")).fingerprint()
    assert to_dict(corpus) == {"name": "memory", "sha256": corpus.sha256}
    assert Memory(texts=("a",), sha256=Memory(texts=("a",)).sha256) == Memory(texts=("a",))
    with pytest.raises(DataError, match="memory"):
        from_dict(Corpus, to_dict(corpus)).fingerprint()
    for texts in ((), "a text", (3,), 5):
        with pytest.raises(UsageError, match="texts"):
            Memory(texts=texts)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sha256"):
        Memory(texts=("a",), sha256="0" * 64)


# --- a metric of one's own --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowCount(Metric):
    """How many rows there are, times something."""

    times: int = 1

    def measure(self, model: Any, data: Any, *, seed: int) -> unmask.Measurement:
        return unmask.Measurement(float(self.times * len(data)), None, len(data), kind="exact", name="rows")


def test_a_metric_of_ones_own(model: Any, trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    measured = unmask.evaluate(model, TEXTS, metric=RowCount(times=2), packing="pad")
    assert (measured.value, str(measured)[:11]) == (80.0, "rows = 80.0")
    unmask.register(RowCount)
    assert unmask.evaluate(model, TEXTS, metric="row_count", times=3, packing="pad").value == 120
    words = ["eval", str(trained.folder), "--device", "cpu", "--metric"]
    assert run([*words, '{"name": "row_count", "times": 2}', "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["value"] == 2 * found["n"]
    assert found["protocol"]["split"] == "valid"
    assert run([*words, "row_count"]) == 0
    assert capsys.readouterr().out.startswith("rows = ")
    for wrong in (["row_coun"], ["row_count", "--num-samples", "3"], ["{"], ['{"name": "row_count", "time": 2}']):
        assert run([*words, *wrong]) == 2, wrong
        assert "row_count" in (err := capsys.readouterr().err) or "JSON" in err or "times" in err


# --- a network and a corpus from scratch ------------------------------------------------------------------------------


class Mixer(Network):
    """Embeddings and their mean over the row: a network that knows nothing of its description."""

    def __init__(self, num_ids: int, mask_id: int, width: int) -> None:
        super().__init__()
        self.num_ids, self.mask_id = num_ids, mask_id
        self.embedding = nn.Embedding(num_ids, width)
        self.out = nn.Linear(width, num_ids)

    def trunk(self, z_BL: Tensor, level_B: Tensor | None = None, **options: Any) -> Tensor:
        e_BLD = self.embedding(z_BL)
        h_BLD = e_BLD + e_BLD.mean(dim=1, keepdim=True)
        at_BK = options.get("at_BK")
        return h_BLD if at_BK is None else h_BLD.gather(1, at_BK[..., None].expand(-1, -1, h_BLD.shape[-1]))

    def head(self, h_ND: Tensor) -> Tensor:
        return self.out(h_ND)


@dataclass(frozen=True, kw_only=True)
class MixerNetwork(Denoiser):
    """A denoiser in a few lines."""

    width: int = 16

    @property
    def causal(self) -> bool:
        return False

    @property
    def uses_level(self) -> bool:
        return False

    def build(self, *, num_ids: int, mask_id: int) -> Network:
        return Mixer(num_ids, mask_id, self.width)


@dataclass(frozen=True, kw_only=True)
class Counting(Corpus):
    """Numbers as words."""

    most: int = 60

    def documents(self) -> Iterator[Document]:
        for i in range(self.most):
            yield Document(f"number {i} is {i % 7}")

    def fingerprint(self) -> str:
        return f"counting to {self.most}"


def test_a_network_and_a_corpus_from_scratch_go_through_a_run(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"denoiser": MixerNetwork(), "data": {"train": Counting()}}
    config = make_config(tmp_path / "run", steps=2, **changes)
    unmask.train(config, device="cpu")
    model = unmask.train(dataclasses.replace(config, steps=4), resume=True, device="cpu")
    model.save(tmp_path / "copy")  # a loaded one knows its description, too
    again = unmask.load(tmp_path / "copy", device="cpu")
    assert again.generate(seed=2) == model.generate(seed=2)
    assert "MixerNetwork" in repr(again)
    assert len(again.hidden("number")[0]) == 16
    assert run(["eval", str(tmp_path / "run"), "--max-rows", "2", "--device", "cpu"]) == 0
    assert "perplexity  ≤" in capsys.readouterr().out


def test_a_network_that_is_none_is_told_before_the_first_step(tmp_path: Path, make_config: MakeConfig) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(MixerNetwork):
        def build(self, *, num_ids: int, mask_id: int) -> Any:
            return nn.Linear(num_ids, num_ids)

    with pytest.raises(UsageError, match="Network"):
        unmask.train(make_config(tmp_path / "run", denoiser=Wrong()), device="cpu")
    assert not (tmp_path / "run" / "recipe.json").exists()
