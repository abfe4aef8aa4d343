"""Run tasks on a Ray cluster, and repeat those whose worker or node died."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_OWN = "flwr_leakage"
"""Ray's namespace of a connection that this module made. If the program that uses it has connected
to Ray itself, the namespace is another one."""


@dataclass(frozen=True)
class RayTasks:
    """The resources that a task needs on a Ray cluster, and how often a lost task is repeated.

    The cluster is the one to which this process is connected, such as that of Flower's simulation.
    If it is connected to none, it connects to the one that ``RAY_ADDRESS`` names or that runs on
    this machine. No cluster is started. Each node must have the package, and the modules of a
    user's own model, loss or attack. A node with another processor may round differently.

    Flower's clients hold their CPUs as long as the simulation runs, even if they are idle while the
    server attacks. If the program holds the CPUs of its cluster in this way, tasks ask Ray for no
    CPU, and as many tasks run at a time as would fit without the clients. Otherwise tasks and
    clients would wait for each other.

    Attributes:
        num_cpus: number of CPUs that a task takes, ≥ 0; with 0 one task runs for each CPU.
        num_gpus: number of GPUs that a task asks for, ≥ 0.
        retries: largest number of times that a task is repeated if its worker or node dies, ≥ 0.
    """

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    retries: int = 3

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus", "retries"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and ≥ 0, got {getattr(self, name)}.")

    def run(
        self,
        work: Callable[[bytes], bytes],
        arguments: Sequence[Callable[[Callable[[Any], bytes]], bytes]],
    ) -> Iterator[tuple[int, bytes | str, list[str]]]:
        """Yield the results of tasks in the order in which they end.

        A submitted task holds its argument in the memory of a node. So at most twice as many tasks
        are submitted at a time as the cluster can run, or just as many if tasks ask Ray for no CPU.

        Args:
            work: a function of an installed module, which each task calls with its argument.
            arguments: one function for each task, which returns the task's argument as bytes. It is
                called with the function that is to be used to pickle.

        Yields:
            The index of the task; the result of ``work``, or a text on why there is none; and a
            sentence for each time that the task was repeated.

        Raises:
            ValueError: Ray is not installed, no cluster runs, no node has the resources that a task
                asks for, or the program that this process belongs to holds all GPUs.
        """
        ray = self._connected()
        asked = self._asked(ray)
        task = ray.remote(
            num_cpus=asked,
            num_gpus=self.num_gpus,
            max_retries=0,  # retries are counted and reported here
            scheduling_strategy="SPREAD",
        )(work)
        room = self._room(ray) * (2 if asked else 1)  # tasks that ask for no CPU start at once
        waiting: deque[tuple[int, list[str]]] = deque((i, []) for i in range(len(arguments)))
        running: dict[Any, tuple[int, list[str]]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < room:
                    index, causes = waiting.popleft()
                    argument = arguments[index](ray.cloudpickle.dumps)
                    running[task.remote(argument)] = index, causes
                (ended,), _ = ray.wait(list(running), num_returns=1)
                index, causes = running.pop(ended)
                try:
                    yield index, ray.get(ended), causes
                except ray.exceptions.RayTaskError as error:  # the task itself raised an error
                    yield index, f"{type(error.cause).__name__}: {error.cause}", causes
                # Any other error of Ray means that the worker, the node or the result of the task
                # was lost.
                except ray.exceptions.RayError as error:
                    causes = [*causes, _in_a_line(error)]
                    if len(causes) <= self.retries:
                        waiting.append((index, causes))
                    else:
                        died = f"the task died {len(causes)} times, lastly of {causes[-1]}"
                        yield index, died, causes[:-1]
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _connected(self) -> Any:
        """Return the module ``ray`` after connecting to a cluster if it is not connected yet."""
        try:
            import ray  # this package belongs to the extra ``all``
        except ImportError as error:
            raise ValueError("attacks on Ray need Ray; flwr[simulation] brings it.") from error
        if ray.is_initialized():
            return ray
        try:
            ray.init(address="auto", namespace=_OWN, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise ValueError(
                "attacks on Ray need a cluster that runs: start one by `ray start --head`, or name "
                "it by RAY_ADDRESS."
            ) from error
        return ray

    def _asked(self, ray: Any) -> float:
        """Return the number of CPUs that each task asks for, given the connected module ``ray``.

        It is ``num_cpus``, or 0 if the program that this process belongs to holds the CPUs itself.
        """
        if ray.get_runtime_context().namespace == _OWN:
            return self.num_cpus  # other programs hold the CPUs, and a task waits for its turn
        for _ in range(4):  # Ray reports freed resources late
            free = ray.available_resources()
            if free.get("CPU", 0.0) >= self.num_cpus and free.get("GPU", 0.0) >= self.num_gpus:
                return self.num_cpus
            time.sleep(0.25)
        if free.get("GPU", 0.0) < self.num_gpus:
            raise ValueError(
                f"attacks ask for {self.num_gpus:g} GPUs of the Ray cluster, and "
                f"{free.get('GPU', 0.0):g} are free: Flower's clients hold theirs for as long as "
                "the simulation runs. Leave some to the attacks."
            )
        return 0.0

    def _room(self, ray: Any) -> int:
        """Return how many tasks the cluster can run at a time, by the CPUs and GPUs of its nodes.

        Raises:
            ValueError: no node has the resources that a task asks for.
        """
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        room = 0
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            has = {name: node["Resources"].get(name, 0.0) for name in asked}
            fits = [int(has[name] // each) for name, each in asked.items() if each > 0]
            room += min(fits, default=max(1, int(has["CPU"])))
        if not room:
            raise ValueError(
                f"a node of the Ray cluster must have the {self.num_cpus:g} CPUs and "
                f"{self.num_gpus:g} GPUs that a task asks for, and none has."
            )
        return room


def _in_a_line(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:200]
