"""Workers on the GPUs of this machine: one at a time on each, from one queue."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from labkit import jobs, places, worker
from labkit.gpus import Gpu
from labkit.jobs import Job

Slot = TypeVar("Slot")


@dataclass
class Task:
    """A job that was given to an engine."""

    where: str = ""
    """On what it runs; empty as long as it waits."""
    future: "Future[str] | None" = None

    def done(self) -> bool:
        """Whether it has ended."""
        assert self.future is not None
        return self.future.done()

    def error(self) -> str:
        """Why it ended without a result, as the end of a sentence."""
        assert self.future is not None
        return self.future.result()


class Pool(Generic[Slot]):
    """Does as many jobs at a time as there are slots; ``work(job, slot, stopped)`` says how one ended."""

    poll_s = 0.2

    def __init__(self, slots: Sequence[Slot], work: Callable[[Job, Slot, Callable[[], bool]], str]) -> None:
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._work = work
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(len(slots))

    def start(self, wanted: Sequence[Job]) -> list[Task]:
        """Prepare jobs and queue them."""
        for job in wanted:
            jobs.prepare(job)
        tasks = [Task() for _ in wanted]
        for job, task in zip(wanted, tasks, strict=True):
            task.future = self._threads.submit(self._do, job, task)
        return tasks

    def stop(self) -> None:
        """End the workers, and forget the jobs that wait; gives back when that is done."""
        self._stopped.set()
        self._threads.shutdown(cancel_futures=True)

    def _do(self, job: Job, task: Task) -> str:
        slot = self._free.get()
        task.where = str(slot)
        try:
            return self._work(job, slot, self._stopped.is_set)
        finally:
            self._free.put(slot)


def on_gpus(chosen: Sequence[Gpu]) -> Pool[Gpu]:
    """A worker process on each of these GPUs, which sees no other."""

    def work(job: Job, gpu: Gpu, stopped: Callable[[], bool]) -> str:
        environment = {"CUDA_VISIBLE_DEVICES": gpu.visible, "PYTHONPATH": places.python_path()}
        return worker.how_it_ended(worker.launch((*worker.COMMAND, str(job.file)), environment, stopped))

    return Pool(chosen, work)
