"""Hang report: a thread that logs where this rank is in its step when nothing has moved for a while."""

from __future__ import annotations

import logging
import threading
import time
import weakref

from megatron_fsdp.runtime.schedule import Schedule

logger = logging.getLogger(__name__)


def report_hangs(schedule: Schedule, after_s: float) -> None:
    """Warns once whenever no unit has been entered or left for `after_s` seconds; compare the lines of all ranks.

    Look first at the rank whose pass, operation or event differs from the others'. The report communicates nothing and
    does not ask the device: a host that waits for the device is between two passes.
    """
    reference = weakref.ref(schedule)
    threading.Thread(target=_watch, args=(reference, after_s), name="megatron_fsdp hang report", daemon=True).start()


def _watch(reference: weakref.ref[Schedule], after_s: float) -> None:
    last, since, is_told = -1, time.monotonic(), False
    while True:
        time.sleep(min(1.0, after_s / 4))
        schedule = reference()
        if schedule is None:
            return
        if schedule.events != last:
            last, since, is_told = schedule.events, time.monotonic(), False
        elif last and not is_told and time.monotonic() - since >= after_s:
            is_told = True
            logger.warning("nothing has moved for %g s: %s", after_s, schedule.where())
        del schedule
