"""Where both injection doors lead: loads this folder as the private package `_tdbg_agent` and arms the import hook.

Runs at the start of every Python process below `tdbg-run`, before the user's first line, so it imports what the
interpreter has loaded already and nothing else (`importlib.machinery` alone costs 0.6 ms), and lets no error out.
Executed by path, never imported as part of `tdbg`: with that name in `sys.modules` a user's own `tdbg.py` is lost.
"""

import os
import sys

PACKAGE = "_tdbg_agent"


def start() -> str:
    """Arm the agent once per process; later calls do nothing. Returns why it could not, "" when it did or need not."""
    if not os.environ.get("TDBG_RUN") or PACKAGE in sys.modules:
        return ""
    try:
        _load_package()
        from _tdbg_agent import afterimport  # type: ignore[import-not-found]  # the name exists from here on only

        afterimport.arm()
    except Exception as e:  # the user's program goes on; the reader reports a rank that recorded nothing
        return f"{type(e).__name__}: {e}"
    return ""


def _load_package() -> None:
    """Put this folder into `sys.modules` under its private name; its modules are then imported in the ordinary way."""
    # CPython 3.10 to 3.14: `importlib.util` and `importlib.machinery` take these from here
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import spec_from_file_location

    folder = os.path.dirname(os.path.abspath(__file__))
    spec = spec_from_file_location(PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} can't be loaded as a package")
    module = module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
