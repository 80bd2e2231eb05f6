"""Numbers of strategies, from the engine's table: a new row is met by every test that takes them from here."""

from megatron_fsdp.plan.strategy import RESTING

STRATEGIES = tuple(range(len(RESTING)))
#: A number that no strategy has.
NO_STRATEGY = len(RESTING)
