"""What a run cost, as a table."""

from flwr_leakage.report.index import MAX_ROWS, Index, Table, by_round, label, unit_of, values

CLOCKS = (
    "Wall seconds are what a clock on the wall shows, waiting included. CPU seconds are what the "
    "processors worked: less where the machine is shared, more where several work at once. Time "
    "limits of attacks count CPU seconds."
)


def costs_table(index: Index) -> Table:
    """Return one row a round and a total; each cost is summed over the clients."""
    names = index.names("cost")
    rounds = index.rounds("cost")
    values_in = {name: by_round(index.series("cost", name)) for name in names}
    rows = [
        (
            str(server_round) if server_round else "whole run",
            *(f"{sum(values_in[name].get(server_round, [])):,.2f}" for name in names),
        )
        for server_round in rounds
    ]
    totals = (f"{sum(values(index.series('cost', name))):,.2f}" for name in names)
    columns = tuple(_cost_heading(name, unit_of(index.series("cost", name))) for name in names)
    return Table(("round", *columns), (("total", *totals), *rows), (CLOCKS,), MAX_ROWS)


def _cost_heading(name: str, unit: str) -> str:
    words = label(name.removesuffix("_seconds"))
    return f"{words}, {'s' if name.endswith('_seconds') else unit or '1'}"
