"""How generation and optimisation interlock: the arithmetic of groups, micro-batches and windows, in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Schedule:
    """One *window*: completions are generated once, then feed `micro_batches` micro-batches, `num_iterations` times over.

    A generation batch has `batch_size * world_size * micro_batches` samples, `num_generations` of each prompt, prompt after
    prompt. It is cut into optimizer steps first and each step into runs, one for each process, so that a step has the same
    samples whatever the number of processes, and a group lies on as few of them as can be.
    """

    num_generations: int
    batch_size: int  # samples of a micro-batch of one process
    world_size: int
    accumulation: int  # micro-batches of an optimizer step
    micro_batches: int  # that one generation feeds, on each process (`steps_per_generation`)
    num_iterations: int

    @classmethod
    def of(
        cls,
        *,
        num_generations: int,
        batch_size: int,
        world_size: int,
        accumulation: int,
        num_iterations: int = 1,
        generation_batch_size: int | None = None,
        steps_per_generation: int | None = None,
    ) -> Schedule:
        """From options under TRL's names; a sentence where they do not divide."""
        if generation_batch_size is not None and steps_per_generation is not None:
            raise ValueError("Set `generation_batch_size` or `steps_per_generation`: each follows from the other.")
        a_micro_batch = batch_size * world_size
        if generation_batch_size is not None:
            if generation_batch_size % a_micro_batch:
                raise ValueError(
                    f"`generation_batch_size` is {generation_batch_size}; it must be a multiple of the {a_micro_batch} samples of "
                    f"a micro-batch (`per_device_train_batch_size` {batch_size} x {world_size} processes)."
                )
            steps_per_generation = generation_batch_size // a_micro_batch
        steps = accumulation if steps_per_generation is None else steps_per_generation
        if steps < 1:
            raise ValueError(f"`steps_per_generation` is {steps}; it must be at least 1.")
        samples = a_micro_batch * steps
        if samples % num_generations:
            raise ValueError(
                f"A generation batch has {samples} samples ({batch_size} per device x {world_size} processes x {steps} "
                f"micro-batches), which is not a multiple of `num_generations`={num_generations}: groups would be incomplete. "
                "Change `per_device_train_batch_size`, `gradient_accumulation_steps` or `num_generations`."
            )
        return cls(num_generations, batch_size, world_size, accumulation, steps, num_iterations)

    @property
    def share(self) -> int:
        """Samples of a generation batch that one process owns."""
        return self.batch_size * self.micro_batches

    def places(self, rank: int) -> list[int]:
        """Which samples of a generation batch a process owns, in the order of its micro-batches."""
        whole_steps = self.micro_batches % self.accumulation == 0
        run = self.batch_size * (self.accumulation if whole_steps else self.micro_batches)  # of a process, in a step
        starts = range(rank * run, self.samples, run * self.world_size)
        return [start + place for start in starts for place in range(run)]

    def written_by(self, size: int) -> Schedule:
        """The same generation batches where each process is `size` of them, which train on the same samples and write a part each.

        What is one process's here is, step by step, that of its first, its second, ...: see `whole_window`.
        """
        if size == 1:
            return self
        steps, rest = divmod(self.micro_batches, self.accumulation)
        steps = 1 if rest else steps
        if self.share // steps % size:
            raise ValueError(
                f"`sequence_parallel_size` is {size}: so many processes train on the same samples, {self.share // steps} a step, "
                "and each writes as many of them. Make `per_device_train_batch_size` x `gradient_accumulation_steps` a "
                "multiple of it."
            )
        each = self.share // steps // size
        return replace(self, batch_size=each, world_size=self.world_size * size, accumulation=1, micro_batches=steps)

    @property
    def splits_groups(self) -> bool:
        """Whether some group lies on several processes."""
        owners: dict[int, set[int]] = {}
        for rank in range(self.world_size):
            for place in self.places(rank):
                owners.setdefault(place // self.num_generations, set()).add(rank)
        return any(len(ranks) > 1 for ranks in owners.values())

    @property
    def samples(self) -> int:
        """Of a generation batch, over all processes."""
        return self.share * self.world_size

    @property
    def prompts(self) -> int:
        return self.samples // self.num_generations

    @property
    def window(self) -> int:
        """Micro-batches of one process from one generation to the next."""
        return self.micro_batches * self.num_iterations

    @property
    def is_on_policy(self) -> bool:
        """No optimizer step falls between the generation of a sample and its last use."""
        return self.accumulation % self.window == 0

    def micro_batches_of_epoch(self, prompts: int) -> int:
        """What fills whole generation batches; the rest of the prompts waits for another order."""
        return prompts // self.prompts * self.window

    def sentence(self, max_tokens: int) -> str:
        """The arithmetic in words."""
        step = self.batch_size * self.world_size * self.accumulation
        steps = self.window / self.accumulation
        again = f", in {self.num_iterations} passes" if self.num_iterations > 1 else ""
        return (
            f"{self.prompts} prompts x {self.num_generations} completions = {self.samples} samples a generation (up to "
            f"{self.samples * max_tokens:,} tokens) feed {steps:g} optimizer step{'s' * (steps != 1)}{again}; an optimizer step "
            f"sees {step} samples ({self.batch_size} x {self.world_size} process{'es' * (self.world_size > 1)} x "
            f"{self.accumulation} micro-batch{'es' * (self.accumulation > 1)})"
        )
