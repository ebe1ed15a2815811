"""PyramidKV in a config.json: the number of a prompt's tokens that each layer keeps, and their selection. No torch.

    "pyramid_kv": {"average": 2048, "groups": 8, "queries": 32, "pool": 5}

Layers keep `average` tokens on average, fewer from the first layer to the last. Every layer keeps the last `queries`
tokens. Of those before, the last layer keeps a twentieth of the average, as in the paper. Layers form `groups` of equal
size with one budget each, `queries` plus a multiple of 16, so that their pages have one size. Alternatively `budgets`
lists each layer's budget, null for a layer that keeps all.
"""

from __future__ import annotations

from quire.errors import StartupError, short_repr
from quire.models.config_reader import MAX_SIZE, ConfigReader
from quire.protocol.model_spec import SnapKVSelection

BETA = 20
"""The average budget divided by the last layer's (PyramidKV's beta)."""

BUDGET_STEP = 16
"""The selected tokens of a budget are a multiple of it, the tokens of a page."""

MAX_QUERIES, MAX_POOL = 1024, 255
KEYS = ("average", "groups", "queries", "pool", "budgets")
SOURCE = "pyramid_kv of config.json"


def read_budgets(fields: ConfigReader, layers: int, max_len: int) -> tuple[tuple[int | None, ...], SnapKVSelection]:
    """Return each layer's budget, None if it keeps all, and the selection. Raise StartupError for an invalid value."""
    section = fields.config.get("pyramid_kv")
    if section is None:
        return (None,) * layers, SnapKVSelection()
    if not isinstance(section, dict) or (unknown := [name for name in section if name not in KEYS]):
        wrong = short_repr(unknown[0]) if isinstance(section, dict) else short_repr(section)
        raise StartupError(f"{SOURCE} has {wrong}", f"It is an object of {', '.join(KEYS)}")
    reader = ConfigReader(section, SOURCE)
    selection = SnapKVSelection(reader.get_int("queries", 32, MAX_QUERIES), reader.get_int("pool", 5, MAX_POOL))
    if selection.pooling_kernel % 2 == 0:
        raise StartupError(
            f"pool in {SOURCE} is {selection.pooling_kernel}", "It must be odd: a token and its neighbours"
        )
    if (section.get("budgets") is None) == (section.get("average") is None):
        raise StartupError(f"{SOURCE} must have either average or budgets", "Give one of them")
    if section.get("budgets") is not None:
        return _read_listed_budgets(section["budgets"], layers, selection.observation_window, max_len), selection
    average, groups = reader.get_int("average", maximum=max_len), reader.get_int("groups", min(layers, 8), layers)
    if average < selection.observation_window:
        raise StartupError(
            f"average in {SOURCE} is {average}", f"It must be at least the {selection.observation_window} queries"
        )
    if layers % groups:
        raise StartupError(f"groups in {SOURCE} is {groups}", f"It must divide the {layers} layers")
    return linear_budgets(average, selection.observation_window, layers, groups), selection


def linear_budgets(average: int, queries: int, layers: int, groups: int) -> tuple[int, ...]:
    """Return budgets that fall linearly from the first layer to the last, averaged over each group of layers."""
    mean = average - queries
    low = mean / BETA
    high = 2 * mean - low
    size = layers // groups
    budgets = []
    for layer in range(layers):
        middle = (layer // size + 0.5) * size - 0.5  # of the layers of its group
        chosen = high - (high - low) * (middle / (layers - 1) if layers > 1 else 0.5)
        budgets.append(queries + round(chosen / BUDGET_STEP) * BUDGET_STEP)
    return tuple(budgets)


def _read_listed_budgets(budgets: object, layers: int, queries: int, max_len: int) -> tuple[int | None, ...]:
    if not isinstance(budgets, list) or len(budgets) != layers:
        raise StartupError(f"budgets in {SOURCE} is {short_repr(budgets)}", f"It must be a list of {layers} numbers")
    most = min(max_len, MAX_SIZE)
    for budget in budgets:
        if budget is not None and (type(budget) is not int or not queries <= budget <= most):
            raise StartupError(
                f"budgets in {SOURCE} has {short_repr(budget)}",
                f"A layer keeps from {queries} tokens, its last queries, to {most}; null: all of them",
            )
    if all(budget is None for budget in budgets):
        raise StartupError(f"budgets in {SOURCE} has no number", "Leave pyramid_kv out: every layer keeps all")
    return tuple(budgets)
