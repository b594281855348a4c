"""Replacing functions of another package, and putting them back: the integrations' install() and uninstall()."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def check_signature(where: str, theirs: Callable[..., Any], ours: Callable[..., Any], tested: str) -> None:
    """RuntimeError unless both take parameters of the same names in the same order; tested: "package >=a,<=b"."""
    found, known = (list(inspect.signature(function).parameters) for function in (theirs, ours))
    if found != known:
        raise RuntimeError(f"{where} takes {found}, this integration knows {known}; it was tested with {tested}")


class Patches:
    """What was replaced in one package, for undo()."""

    def __init__(self, package: str, tested: str) -> None:
        self.package, self.tested = package, f"{package} {tested}"
        self._undo: list[tuple[Any, str, Any]] = []
        self._waiting = _AfterImport()

    def __bool__(self) -> bool:
        return bool(self._undo or self._waiting.actions)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set owner.name, and the same object wherever a loaded module of the package imported it by name."""
        old = getattr(owner, name)
        check_signature(f"{getattr(owner, '__module__', '')} {owner.__name__}.{name}".strip(), old, new, self.tested)
        if isinstance(new, type):
            check_signature(f"{owner.__name__}.{name}.forward", old.forward, new.forward, self.tested)  # type: ignore[attr-defined]
        prefix = self.package + "."
        importers = [m for n, m in list(sys.modules.items()) if n.startswith(prefix) and vars(m).get(name) is old]
        for holder in {id(x): x for x in (owner, *importers)}.values():
            self.set(holder, name, new)

    def set(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def after_import(self, module: str, action: Callable[[ModuleType], None]) -> None:
        """Call action(module) now if it is loaded, else right after whoever imports it first has loaded it."""
        loaded = sys.modules.get(module)
        if loaded is not None:
            action(loaded)
            return
        self._waiting.actions[module] = action
        if self._waiting not in sys.meta_path:
            sys.meta_path.insert(0, self._waiting)

    def undo(self) -> None:
        for owner, name, old in reversed(self._undo):
            setattr(owner, name, old)
        self._undo.clear()
        self._waiting.actions.clear()
        if self._waiting in sys.meta_path:
            sys.meta_path.remove(self._waiting)


class _AfterImport(MetaPathFinder):
    def __init__(self) -> None:
        self.actions: dict[str, Callable[[ModuleType], None]] = {}
        self._looking = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if self._looking or fullname not in self.actions:
            return None
        self._looking = True  # the other finders are asked
        try:
            spec = find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)  # may fail, and be tried again
            action = self.actions.pop(fullname, None)
            if action is not None:
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
