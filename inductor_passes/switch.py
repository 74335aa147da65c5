"""Whether our passes are on for the whole process, and when they get into Inductor's configuration: late.

Two ways switch them on: ``INDUCTOR_PASSES=1``, looked at when torch is imported, and
``inductor_passes.config.enabled``. Both only note it. Importing Inductor's configuration costs a second and our passes
another one, so neither is imported before other code imports ``torch._inductor.config``. At that moment the
installer puts light objects into it (``engine/process.py``), and our passes are imported when Inductor first calls one
of those.

This module imports nothing of ours and no torch: ``import torch`` runs it, possibly in the middle of our own import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ENV = "INDUCTOR_PASSES"
ALLOWED = '"1", "true", "on" or "yes", "0", "false", "off" or "no"'
_ON = ("1", "true", "on", "yes")
_OFF = ("", "0", "false", "off", "no")

#: Imported for what it registers here; by name, because everything else is above this module.
_INSTALLER = "inductor_passes.engine.process"
_INDUCTOR = "torch._inductor.config"
#: How torch starts the processes that compile kernels for Inductor: they never run a pass.
_WORKER = os.path.join("torch", "_inductor", "compile_worker", "__main__.py")

log = logging.getLogger("inductor_passes")


def parse(value: str) -> bool | None:
    """What a value of ``INDUCTOR_PASSES`` means; None when it is not allowed."""
    text = value.strip().lower()
    return True if text in _ON else False if text in _OFF else None


class _State:
    """Of this process.

    Attributes:
        on: whether our passes are wanted.
        followed: whether the environment variable was looked at.
        installer: (install, remove) once it is known.
        installed: whether our objects are in Inductor's configuration.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.on = self.followed = self.installed = False
        self.installer: tuple[Callable[[], None], Callable[[], None]] | None = None


_state = _State()


def is_on() -> bool:
    """Whether later ``torch.compile`` calls of this process use our passes."""
    return _state.on


def set_on(value: bool) -> None:
    """Switch our passes on or off for later ``torch.compile`` calls of this process."""
    with _state.lock:
        _state.followed = True
        _state.on = value
        _settle()


def follow_environment(environ: Mapping[str, str] | None = None) -> None:
    """Do what ``INDUCTOR_PASSES`` says, the first time.

    A value that is not allowed leaves our passes off and is logged: it comes out of ``import torch``, which must not
    fail. Using our package raises then (``config.PassConfig.from_env``).
    """
    with _state.lock:
        if _state.followed:
            return
        _state.followed = True
        value = (os.environ if environ is None else environ).get(ENV, "")
        meant = parse(value)
        if meant is None:
            log.warning("%s=%r is not allowed; expected %s. inductor_passes stays off.", ENV, value, ALLOWED)
        elif meant and not (sys.argv and sys.argv[0].endswith(_WORKER)):
            _state.on = True
            _settle()


def register(install: Callable[[], None], remove: Callable[[], None]) -> None:
    """Tell how to put our objects into Inductor's configuration, and how to take them out."""
    with _state.lock:
        _state.installer = (install, remove)
        _settle()


def _settle() -> None:
    """Make Inductor's configuration what it should be, if it has been imported; else when it is."""
    if _state.on == _state.installed:
        return
    if not _is_ready():
        if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watch())
        return
    if _state.installer is None:
        # Registers, which comes back here. While it is being imported already it will do so at its end.
        if _INSTALLER not in sys.modules:
            importlib.import_module(_INSTALLER)
        return
    install, remove = _state.installer
    (install if _state.on else remove)()
    _state.installed = _state.on


def _is_ready() -> bool:
    """Whether Inductor's configuration is imported, all of it."""
    module = sys.modules.get(_INDUCTOR)
    return module is not None and not isinstance(getattr(module.__spec__, "loader", None), _Loader)


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for the import of Inductor's configuration; finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the other finders find, with a loader that tells us when it is done."""
        if name != _INDUCTOR:
            return None
        for finder in list(sys.meta_path):
            spec = None if isinstance(finder, _Watch) else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A module's own loader; afterwards the module has that one alone, and the watch ends."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """As the module's own loader does."""
        module: types.ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """As the module's own loader does; then our turn, whose errors are not the importer's."""
        self._own.exec_module(module)
        with _state.lock:
            try:
                # The module's attributes are Inductor's options; these are not.
                vars(module)["__loader__"] = self._own
                if module.__spec__ is not None:
                    module.__spec__.loader = self._own
                sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
                _settle()
            except Exception as error:
                log.debug("enabling failed", exc_info=True)
                log.warning("inductor_passes stays off: %s: %s", type(error).__name__, error)
