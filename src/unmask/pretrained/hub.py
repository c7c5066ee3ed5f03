"""Upload of our models to the Hugging Face hub; `source` and `registered` read models from there."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unmask.errors import DataError, MissingExtraError, UnmaskError, UsageError
from unmask.heads.task import Task
from unmask.model import Model
from unmask.pretrained.card import Layout
from unmask.pretrained.export import write_transformers
from unmask.storage.model_folder import write_folder
from unmask.storage.untrusted import printable

_REPO = re.compile(r"([A-Za-z0-9][\w-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")
CARD = "README.md"


def check_repo(repo: str) -> None:
    """Refuse what is not a valid repository name on the hub.

    >>> check_repo("me/a model")
    Traceback (most recent call last):
    unmask.errors.UsageError: 'me/a model' is no name of a repository: give one such as me/my-model
    """
    name = repo.rpartition("/")[2]
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo or name.endswith((".git", "-", ".")):
        raise UsageError(f"{repo!r} is no name of a repository: give one such as me/my-model")


def push(
    model: Model,
    repo: str,
    card: Callable[[str], str],
    *,
    task: Task | None = None,
    private: bool = False,
    layout: Layout = "unmask",
    message: str = "",
) -> str:
    """Upload a model's folder and its card to a repository, which is created if necessary; returns its address.

    card: creates the README.md for a repository of that name; an existing one is somebody's work and is kept. private:
    create a private repository; an existing public one is refused.

    >>> push(unmask.load("runs/demo"), "me/demo", lambda name: f"# {name}")  # doctest: +SKIP
    'https://huggingface.co/me/demo'
    """
    check_repo(repo)
    if layout == "hf" and task is not None:
        raise UsageError(
            f"a model that is fine-tuned for a {task.kind} has no class in transformers: push it as unmask"
        )
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise MissingExtraError("huggingface-hub", "hf", "unmask push") from None
    with tempfile.TemporaryDirectory(prefix="unmask-push-") as place:
        folder = Path(place) / "model"
        if layout == "hf":
            write_transformers(model, folder)
        else:
            folder.mkdir()
            write_folder(folder, model, task=task)
        try:
            api = hub.HfApi()
            made = api.create_repo(repo, repo_type="model", private=private or None, exist_ok=True)
            name = str(getattr(made, "repo_id", repo))  # including the user's name
            if private and not api.repo_info(name, repo_type="model").private:
                raise UsageError(
                    f"{name} is there already and public: make it private on the hub, or leave out --private"
                )
            if not api.file_exists(name, CARD):
                (folder / CARD).write_text(card(name), encoding="utf-8")
            said = message or "Model written by unmask"
            api.upload_folder(repo_id=name, folder_path=str(folder), repo_type="model", commit_message=said)
        except UnmaskError:
            raise
        except Exception as e:  # the hub's client raises what its many layers do; none of it is ours to tell apart
            reason = printable((str(e).strip() or type(e).__name__).splitlines()[0], 200)
            raise DataError(
                f"the hub does not take {repo} ({reason}): see that there is a network, that you are logged in (hf "
                "auth login) and may write there"
            ) from None
    return str(made)
