"""dcpd: save and load model checkpoints without stalling the trainer.

    import dcpd
    dcpd.save(state_dict, "main:run1/step-100")                  # blocks until durable
    h = dcpd.async_save(state_dict, "main:run1/step-100")        # returns after the copy into shared memory
    sd = dcpd.load("main:run1/step-100")                         # new tensors
    dcpd.load("main:run1/step-100", into=state_dict)             # in place, any layout
    dcpd.open("main:run1/step-100")["model.w"][0:4]              # reads only that
    r = dcpd.resume("main:run1", into=state_dict)                # the newest that loads; None: a first start
    dcpd.publish(state_dict, "policy")                           # weights for whoever serves them, and there:
    for update in dcpd.subscribe("policy", into=model): ...      # at another layout, whole versions only
    dcpd.keep("main:run1/step-100", "serve", device="cuda:0")    # weights that outlive an inference engine,
    w = dcpd.attach("shm:serve", device="cuda:0")                # which maps them: no copy

Importing connects to nothing, starts no thread and imports neither torch nor numpy; everything below is loaded at first use.
"""
from __future__ import annotations

TYPE_CHECKING = False  # type checkers read it as true; importing typing would take longer than all the rest

__version__ = "0.1.0"

_WHERE = {
    "save": "_save", "async_save": "_save", "wait": "_save", "close": "_save",
    "load": "_load", "resume": "_resume", "runs": "_resume",
    "delta": "_delta", "apply": "_delta", "open": "_open", "inspect": "_open", "diff": "_open",
    "repair": "_open", "materialise": "_open", "Checkpoint": "_open", "TensorSlice": "_open",
    "connect": "client", "Client": "client", "Job": "client",
    "local": "_local", "attach": "_keep", "keep": "_keep", "DeviceView": "_keep", "StateDictView": "_views",
    "publish": "_publish", "Publication": "_publish", "subscribe": "_subscribe", "Subscription": "_subscribe", "Update": "_subscribe",
    "Opaque": "values", "SaveFuture": "future", "verify_webhook": "_webhook",
    **dict.fromkeys((
        "DcpdError", "NoDaemon", "ConnectionLost", "RequestRefused", "Forbidden", "NotFound", "CheckpointExists", "CheckpointHeld", "Busy",
        "SlotsBusy", "NotSealed", "NoSpace", "SharedMemoryFull", "DeviceMemoryFull", "StorageFailed", "CheckpointDamaged", "MissingKey",
        "StateDictMismatch", "NothingToResume", "JobFailed", "JobCancelled", "WaitTimeout", "TensorChanged", "RanksDisagree", "RankFailed",
        "SeveralHosts", "NoSharedMemory", "ProtocolMismatch"), "errors"),
}
__all__ = [*_WHERE, "__version__"]

if TYPE_CHECKING:
    from typing import Any, List

    from ._delta import apply as apply, delta as delta
    from ._keep import DeviceView as DeviceView, attach as attach, keep as keep
    from ._load import load as load
    from ._local import local as local
    from ._open import Checkpoint as Checkpoint, TensorSlice as TensorSlice, diff as diff, inspect as inspect, open as open
    from ._open import materialise as materialise
    from ._open import repair as repair
    from ._publish import Publication as Publication, publish as publish
    from ._resume import resume as resume, runs as runs
    from ._subscribe import Subscription as Subscription, Update as Update, subscribe as subscribe
    from ._save import async_save as async_save, close as close, save as save, wait as wait
    from ._webhook import verify_webhook as verify_webhook
    from ._views import StateDictView as StateDictView
    from .client import Client as Client, Job as Job, connect as connect
    from .errors import *  # noqa: F403
    from .future import SaveFuture as SaveFuture
    from .values import Opaque as Opaque


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        value = getattr(importlib.import_module("." + _WHERE[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})
