"""Numbers of strategies, from the engine's table: a new row is met by every test that takes them from here."""

from megatron_fsdp.config import strategy_name
from megatron_fsdp.plan.strategy import RESTING, plan_for

STRATEGIES = tuple(range(len(RESTING)))
#: A number that no strategy has.
NO_STRATEGY = len(RESTING)
#: All of them, as messages about flags list them.
CHOICES = ", ".join(f"{name} ({number})" for number, name in enumerate(RESTING))


def reduces_each_microbatch(strategy: int | str) -> bool:
    """Points at which this strategy's communication rounds."""
    return plan_for(strategy_name(strategy, "strategy")).reduces_each_microbatch
