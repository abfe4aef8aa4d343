"""What the in-process engine adds to a round, beside training, scores and attacks.

``python -m simulations.benchmarks.engine``: two runs of different length, without scores and
attacks; the difference of their CPU seconds, less the training, is the engine's share. It holds
Flower's strategy and wire format, the checks of every reply, and the records.
"""

from simulations.benchmarks import lab

SHORT, LONG = 2, 22


def cpu_seconds(model: str, num_clients: int, num_rounds: int) -> tuple[float, float, int]:
    """CPU seconds of a run and of the training in it, and the model's parameters."""
    overrides = [
        f"num_rounds={num_rounds}",
        f"model={model}",
        "attack=none",
        "score=none",
        "server.test_samples=1",
    ]
    run = lab.run_rounds(overrides, num_clients)
    training = sum(r.value or 0.0 for r in run.records if r.name == "train_cpu_seconds")
    size = sum(p.numel() for p in run.experiment.network.parameters())
    return run.cpu_seconds, training, size


def main() -> None:
    """Print the table."""
    lab.start(lab.command(__doc__))
    lab.print_header("model", "clients", "parameters", "training, ms a round", "engine, ms a round")
    for model, num_clients in (("lenet", 10), ("lenet", 100), ("resnet8", 10)):
        short, long = (cpu_seconds(model, num_clients, rounds) for rounds in (SHORT, LONG))
        total, training = (
            1000 * (more - less) / (LONG - SHORT)
            for less, more in zip(short[:2], long[:2], strict=True)
        )
        lab.print_row(model, num_clients, short[2], f"{training:.1f}", f"{total - training:.1f}")


if __name__ == "__main__":
    main()
