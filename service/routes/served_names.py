"""The names by which clients may call the served model."""

from __future__ import annotations

from pathlib import Path

from service.errors import UnknownModel
from service.settings import Settings

# Accepts every name, as a name of --served-model-name.
_ANY = "*"
# Says for itself that the client means whatever model the server has.
_DEFAULT = "default"


def served_name(settings: Settings) -> str:
    """Return the name that the server gives its model."""
    return next(name for name in (*_given(settings), _own_name(settings)) if name != _ANY)


def check_model_name(name: str | None, settings: Settings) -> None:
    """Raise UnknownModel if a request is for another model. None: the request is for any model."""
    accepted = _given(settings) or [_own_name(settings), settings.model, _DEFAULT]
    if name is not None and name not in accepted and _ANY not in accepted:
        raise UnknownModel(
            f"model is not the model of this server, which is {served_name(settings)}; send this name, or "
            "start the server with --served-model-name and the names that clients send",
            field="model",
        )


def _given(settings: Settings) -> list[str]:
    """Return the names of --served-model-name."""
    names = map(str.strip, (settings.served_model_name or "").split(","))
    return [name for name in names if name]


def _own_name(settings: Settings) -> str:
    """Return the name of the model's folder, or its id on the Hugging Face Hub."""
    model = Path(settings.model)
    return model.resolve().name if model.is_dir() else settings.model
