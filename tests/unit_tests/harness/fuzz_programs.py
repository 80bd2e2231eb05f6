"""Random programs: a model, how it is sharded and how it is trained, within what the engine asks of its users."""

import dataclasses
import random
from typing import Any

import torch
from torch import nn

from tests.unit_tests.harness import fuzz_models
from tests.unit_tests.harness.fuzz_models import VOCABULARY, Context
from tests.unit_tests.harness.fuzz_tree import Call, Leaf, Node, leaves_of
from tests.unit_tests.harness.models import Batches
from tests.unit_tests.harness.reference import DtypePolicy, Recipe
from tests.unit_tests.harness.sharded import Sharding
from tests.unit_tests.harness.strategies import reduces_each_microbatch

COINS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Options of sharding a model."""

    strategy: int
    outer: int | str | None = None
    units: tuple[str, ...] = ()
    """Names of classes in `fuzz_models`; none: the whole model is one unit."""
    from_meta: bool = False
    is_poisoned: bool = True
    leftover: int = 1 << 22
    """Elements from which on a module outside all units becomes one."""
    slack: int = 1024
    """Padding per shard that is too little to split a group."""
    options: tuple[tuple[str, Any], ...] = ()

    def sharding(self, accumulation: str) -> Sharding:
        """As the harness takes it."""
        options = {"sync_model_each_microbatch": accumulation == "auto", **dict(self.options)}
        if self.from_meta:
            options["init_model_with_meta_device"] = True
        return Sharding(
            strategy=self.strategy,
            outer=self.outer,
            units=tuple(getattr(fuzz_models, name) for name in self.units) or None,
            is_poisoned=self.is_poisoned,
            options=options,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that a run depends on."""

    seed: int
    ranks: int
    width: int
    tree: Node
    has_stem: bool
    plan: Plan
    reload_plan: Plan | None = None
    """Sharding of a fresh model that takes over in the middle; None: no model does."""
    reload_at: int = 0
    """Steps before that."""
    compute: torch.dtype | None = None
    main_params: torch.dtype | None = torch.float32
    main_grads: torch.dtype | None = None
    grad_comm: torch.dtype | None = None
    optimizer: str = "sgd"
    max_norm: float | None = None
    is_mean: bool = True
    steps: int = 2
    microbatches: int = 1
    accumulation: str = "flag"
    """Sign of the last micro-batch for the engine: a flag, `no_sync`, none, or automatic synchronization."""
    syncs_between: bool = False
    """Gradients are synchronized after every micro-batch as well."""
    evaluates: bool = False
    """A forward without gradients precedes every step."""

    @property
    def is_lossy(self) -> bool:
        """Something is rounded to 8 bits."""
        dtypes = (self.compute, self.main_params, self.main_grads, self.grad_comm)
        parts = any(leaf.is_half for leaf in leaves_of(self.tree)) or any(n.has_autocast for n in nodes_of(self.tree))
        return torch.bfloat16 in dtypes or parts

    @property
    def recipe(self) -> Recipe:
        """Options of training."""
        return Recipe(
            build_optimizer=_sgd if self.optimizer == "sgd" else _adamw,
            loss_fn=_loss,
            dtypes=DtypePolicy(
                compute=self.compute,
                main_params=self.main_params,
                main_grads=self.main_grads,
                grad_comm=self.grad_comm,
            ),
            reduces_each_microbatch=reduces_each_microbatch(self.plan.strategy),
            is_mean_over_ranks=self.is_mean,
            max_norm=self.max_norm,
        )

    def build(self) -> nn.Module:
        """The model."""
        return fuzz_models.build_model(self.tree, self.width, has_stem=self.has_stem, dtype=self.compute)

    def batches(self) -> Batches:
        """`[step][microbatch][rank]`."""
        return [
            [[self._batch(step, number, rank) for rank in range(self.ranks)] for number in range(self.microbatches)]
            for step in range(self.steps)
        ]

    def _batch(self, step: int, number: int, rank: int) -> tuple[Any, torch.Tensor]:
        alike = random.Random(f"{self.seed} {step} {number}")
        step_coins = tuple(alike.random() < 0.5 for _ in range(COINS))
        own = random.Random(f"{self.seed} {step} {number} {rank}")
        rank_coins = tuple(own.random() < 0.5 for _ in range(COINS))
        if number == 0 and step in (0, self.reload_at):  # a first forward shows that ranks differ, and all that may run
            step_coins, rank_coins = (False,) * COINS, (rank > 0,) * COINS
        generator = torch.Generator().manual_seed(own.randrange(1 << 30))
        x, target = (torch.randn(2, self.width, generator=generator) for _ in range(2))
        tokens = torch.randint(VOCABULARY, (2,), generator=generator)
        return (x, Context(tokens, step_coins, rank_coins, step + number)), target


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5, weight_decay=0.01)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    # With torch's epsilon the sign of a gradient of nearly zero would decide over a whole step.
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=0.01)


def nodes_of(tree: Node | Leaf) -> list[Node]:
    """Every node."""
    return [tree, *(n for child in tree.children for n in nodes_of(child))] if isinstance(tree, Node) else []


def unit_choices(tree: Node) -> list[str]:
    """Names of the classes of modules in the tree that a user may name as units."""
    inner = {"linear": "_Linear", "norm": "_Norm", "embedding": "_Embedding", "conv": "_Conv", "table": "Table"}
    names = {f"Block{node.cls}" for node in nodes_of(tree)}
    for leaf in leaves_of(tree):
        names.add(fuzz_models.LEAVES[leaf.kind].__name__)
        names |= {inner[leaf.kind]} & set(inner.values()) if leaf.kind in inner else set()
    return sorted(names)


# ---- chance ----


def random_program(seed: int, ranks: int) -> Program:
    """The program of a seed, always the same."""
    chance = random.Random(f"program {seed} {ranks}")
    has_coins = chance.random() < 0.5
    has_stem = has_coins or chance.random() < 0.5
    tree = _Trees(chance, has_coins=has_coins).tree()
    plan = _random_plan(chance, tree, ranks)
    reload_plan = None
    if chance.random() < 0.3:
        reload_plan = plan if chance.random() < 0.3 else _random_plan(chance, tree, ranks)
        # Where communication rounds would change in the middle.
        reload_plan = dataclasses.replace(reload_plan, options=plan.options)
    steps = chance.choice((2, 2, 3))
    return Program(
        seed=seed,
        ranks=ranks,
        width=chance.choice((2, 3, 4, 5, 7, 8, 11)),
        tree=tree,
        has_stem=has_stem,
        plan=plan,
        reload_plan=reload_plan,
        reload_at=chance.randrange(steps),
        compute=chance.choice((None, None, None, None, torch.bfloat16, torch.float64)),
        main_params=chance.choice((torch.float32, torch.float32, torch.float32, None, torch.float64)),
        main_grads=chance.choice((None, None, torch.float32, torch.float64)),
        grad_comm=chance.choice((None, None, None, torch.float32, torch.float64, torch.bfloat16)),
        optimizer=chance.choice(("sgd", "adamw")),
        max_norm=chance.choice((None, None, 0.1, 10.0)),
        is_mean=chance.random() < 0.8,
        steps=steps,
        microbatches=chance.choice((1, 1, 2, 3)),
        accumulation=chance.choice(("flag", "flag", "no_sync", "never", "auto")),
        syncs_between=chance.random() < 0.1,
        evaluates=chance.random() < 0.25,
    )


def _random_plan(chance: random.Random, tree: Node, ranks: int) -> Plan:
    strategy = chance.choice((0, 1, 2, 3, 3, 3))
    outer: int | str | None = None
    if ranks % 2 == 0 and chance.random() < (0.7 if ranks == 4 else 0.2):
        outer = "optim" if strategy == 3 and chance.random() < 0.6 else 0
    names = unit_choices(tree)
    units = tuple(chance.sample(names, min(len(names), chance.choice((1, 1, 2, 2, 3, 5)))))
    options = {
        name: value
        for name, value in (
            ("average_in_collective", True),
            ("overlap_grad_reduce", False),
            ("overlap_param_gather", False),
        )
        if chance.random() < 0.2
    }
    return Plan(
        strategy=strategy,
        outer=outer,
        units=() if chance.random() < 0.1 else ("FuzzModel", *units) if chance.random() < 0.05 else units,
        from_meta=strategy > 0 and chance.random() < 0.2,
        is_poisoned=chance.random() < 0.7,
        leftover=chance.choice((1 << 22, 1 << 22, 20)),
        slack=chance.choice((1024, 0)),
        options=tuple(options.items()),
    )


class _Trees:
    """Draws trees of at most three levels."""

    def __init__(self, chance: random.Random, *, has_coins: bool):
        self._chance = chance
        self._has_coins = has_coins
        """Ranks may leave out different parts. Then gradients flow through everything that runs (there is a stem), and
        the first forward shows it: see "Schedule" in docs/internals.md."""
        self._has_frozen = chance.random() < 0.3
        self._has_half = chance.random() < 0.1
        self._has_recompute = chance.random() < 0.4
        self._has_autocast = chance.random() < 0.1
        self._ties: dict[tuple[str, int], int] = {}
        self._count = 0

    def tree(self) -> Node:
        """A tree."""
        return self._node(0)

    def _node(self, depth: int) -> Node:
        chance = self._chance
        children = tuple(self._child(depth) for _ in range(chance.choice((1, 2, 3, 3, 4) if depth < 2 else (1, 2))))
        order = [number for number in range(len(children)) if chance.random() > 0.08]
        if chance.random() < 0.4:
            chance.shuffle(order)
        if order and chance.random() < 0.3:
            order.insert(chance.randrange(len(order) + 1), chance.choice(order))
        rules = [self._rule() for _ in children]
        by_call = chance.random() < 0.5
        return Node(
            cls=chance.choice("ABC"),
            children=children,
            calls=tuple(self._call(number, self._rule() if by_call else rules[number]) for number in order),
            output=chance.choice(("tensor", "tensor", "tuple", "dict", "dataclass", "object")),
            has_autocast=self._has_autocast and chance.random() < 0.3,
            # Where ranks run different units, nothing tells them of another order.
            is_rotating=chance.random() < 0.1 and not self._has_coins,
        )

    def _rule(self) -> tuple[str, int]:
        """Condition under which a child is left out."""
        chance = self._chance
        kind = chance.choice(("", "", "", "", "step", "rank"))
        if kind == "rank" and not self._has_coins:
            kind = ""
        return kind, chance.randrange(COINS)

    def _call(self, child: int, rule: tuple[str, int]) -> Call:
        chance = self._chance
        recompute = chance.choice(("", "reentrant", "plain")) if self._has_recompute else ""
        mode = chance.choice(("positional",) * 6 + ("keyword",) * 2 + ("no_grad",) * (chance.random() < 0.3))
        if mode == "no_grad":
            recompute = ""
        return Call(child=child, skip=rule[0], site=rule[1], recompute=recompute, mode=mode)

    def _child(self, depth: int) -> Node | Leaf:
        if depth < 2 and self._chance.random() < (0.5 if depth == 0 else 0.35):
            return self._node(depth + 1)
        return self._leaf()

    def _leaf(self) -> Leaf:
        chance = self._chance
        self._count += 1
        kinds = sorted(fuzz_models.LEAVES) + ["linear"] * 2
        kind = chance.choice([kind for kind in kinds if self._has_coins or kind != "choosy"])
        size = chance.randrange(COINS) if kind == "choosy" else chance.choice((1, 2, 3, 5, 13))
        frozen, tie = "", 0
        if self._has_frozen and kind != "choosy":
            frozen = chance.choice(("", "", "all", "first"))
        if not frozen and kind not in ("choosy", "odd") and chance.random() < 0.2:
            tie = self._ties.setdefault((kind, size), len(self._ties) + 1)
        is_half = self._has_half and not tie and chance.random() < 0.4
        return Leaf(
            kind=kind,
            seed=self._count,
            size=size,
            frozen=frozen,
            is_whole=chance.random() < 0.1,
            is_half=is_half,
            tie=tie,
        )
