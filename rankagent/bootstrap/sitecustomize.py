"""First door: found through PYTHONPATH when Python starts. Starts the agent, then gives way to the user's own file."""

import os
import sys

_here = os.path.dirname(__file__)  # site has made both this and the entries of sys.path absolute
try:
    from _frozen_importlib_external import SourceFileLoader as _Loader  # cached code: a bare compile() costs 1.4 ms

    _names = {"__file__": os.path.join(os.path.dirname(_here), "boot.py")}
    exec(_Loader("_tdbg_boot", _names["__file__"]).get_code("_tdbg_boot"), _names)  # type: ignore[arg-type]
    not_started = _names["start"]()  # type: ignore[operator]
except Exception as _error:  # an incomplete installation of ours must not show in the user's program
    not_started = repr(_error)

_ours, _before = sys.modules.get("sitecustomize"), list(sys.path)
_hidden = [p for p in _before if p != _here]
if _ours and len(_hidden) < len(_before):  # else this very file would be found again, and again
    sys.path[:] = _hidden
    del sys.modules["sitecustomize"]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the user's
    except ImportError as _error:
        if _error.name != "sitecustomize":
            raise
    finally:
        sys.path[:] = _before if sys.path == _hidden else [*sys.path, _here]  # what the user's file changed stays
    sys.modules.setdefault("sitecustomize", _ours)
loaded = True
